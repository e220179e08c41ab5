"""Norms of what goes into sums of gradients and comes out, told beside losses: no bit of a sum changes, each counts once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import Tensor

from adaptra.collectives.algorithms import AlgorithmWithout
from adaptra.collectives.rounds import ALGORITHMS, Algorithm
from adaptra.planning.synchrony.noise_scale import TermNorms
from adaptra.program.roles import Roles
from adaptra.runtime.data_parallel.accumulators import Accumulators
from adaptra.runtime.data_parallel.collectives.fold import fold
from adaptra.runtime.data_parallel.collectives.terms import LEAST_AHEAD_BYTES, Terms
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.data_parallel.gradient_sum import GradientSum
from adaptra.runtime.data_parallel.sum_norms import SumNorms
from adaptra.runtime.data_parallel.told_norms import ToldNorms
from adaptra.runtime.launch.launch import HOST
from adaptra.runtime.world.world import WorkerId, World

MOST = 5
LARGE = MOST * LEAST_AHEAD_BYTES // 4 + 7
SHAPES = {"large": (LARGE,), "small": (3, 5), "none": (0,), "copy": (40,), "half": (70,), "complex": (6,)}
DTYPES = {"half": torch.bfloat16, "complex": torch.complex64}
COUNTED = [name for name in SHAPES if name != "copy"]
SCALE = 1024.0
BUCKETS = 1 << 22, 1 << 16
"""Bytes: all of it in one bucket, whose parts are added ahead, and many buckets in which the large tensor has its pieces."""


def gradient(name: str, replica: int, case: int) -> Tensor:
    made = torch.Generator().manual_seed(100 * case + replica)
    return torch.randn(SHAPES[name], generator=made, dtype=DTYPES.get(name, torch.float32))


def algorithms(replicas: int) -> dict[str, Algorithm]:
    if replicas == 2:
        return {**ALGORITHMS}
    last = replicas - 1
    late = {"merge": (0,), "swap": (last,), "streamed": (0, last)}
    without = [AlgorithmWithout(name, ranks) for name, ranks in late.items()]
    return {**ALGORITHMS, **{str(one): one for one in (*without, AlgorithmWithout("streamed", (0,), (0,)))}}


def one_step(
    replicas: Replicas, case: int, bucket: int, *, mean: bool, owners: dict[str, int], measures: bool
) -> tuple[list[Tensor], ToldNorms | None]:
    """The results of a step that a replica has, and what all have told."""
    parameters = {name: torch.zeros(shape, dtype=DTYPES.get(name)).requires_grad_() for name, shape in SHAPES.items()}
    sums, index = Accumulators(parameters), replicas.index
    norms = SumNorms(COUNTED, sums, index, replicas.count) if measures else None
    summed = GradientSum(replicas, sums, (), bucket, mean, time.monotonic, norms)
    if owners:
        summed.bring_to(owners)
    sums.begin_step()
    summed.begin_step()
    if index == case % replicas.count:
        time.sleep(0.02)  # so that the others' terms are added ahead of this one
    for name in [*parameters][::-1]:
        sums.put(name, gradient(name, index, case))
        summed.complete(name)
    summed.end_step()
    summed.close()
    own = [sums.total(name) for name in parameters if owners.get(name, index) == index]
    if norms is None:
        return own, None
    told = ToldNorms(index, replicas.count, of_sums=not mean)
    told.take(norms.read(), 8.0 + index, SCALE)
    column = told.told()
    losses = replicas.combine_losses(torch.ones(2), mean=mean, beside=[column])
    assert losses.tolist() == [1.0 if mean else replicas.count] * 2
    told.meet(column, mean=mean)
    return own, told


def by_force(replicas: int, case: int, *, mean: bool) -> TermNorms:
    """The norms from all gradients, one after the other."""
    counts = [1.0 if mean else 8.0 + one for one in range(replicas)]
    terms, whole = [0.0] * replicas, 0.0
    for name in COUNTED:
        gradients = [gradient(name, one, case) for one in range(replicas)]
        real = [torch.view_as_real(one).reshape(-1) if one.is_complex() else one.reshape(-1) for one in gradients]
        total = torch.empty_like(real[0])
        fold(real, total, replicas if mean else 1)
        whole += total.double().square().sum().item()
        for replica, one in enumerate(real):
            terms[replica] += one.double().square().sum().item() / (SCALE * counts[replica]) ** 2
    return TermNorms(tuple(terms), whole / (SCALE * (1 if mean else sum(counts))) ** 2)


def compare(rank: int) -> tuple[list[str], int]:
    """What is wrong, and how often terms were added ahead."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ahead, found = 0, list[str]()
    add_ahead = Terms.add_ahead

    def counted(self: Terms, part: int, end: int) -> bool:
        nonlocal ahead
        has_added = add_ahead(self, part, end)
        ahead += has_added
        return has_added

    Terms.add_ahead = counted  # type: ignore[method-assign]
    for count in range(2, MOST + 1):
        if rank < count:
            replicas = Replicas(World.of_roles(Roles.initial(count, 1)), WorkerId(rank), f"of {count}", HOST)
            found += differences(replicas)
            replicas.end()
    return found, ahead


def differences(replicas: Replicas) -> Iterator[str]:
    case = 0
    placed = {name: number % replicas.count for number, name in enumerate(SHAPES)}
    for name, algorithm in algorithms(replicas.count).items():
        for bucket in BUCKETS:
            for mean, owners in ((True, {}), (False, {}), (True, placed)):
                case += 1
                replicas.add_by(algorithm, limit=bucket, dtype=None)
                how = f"{replicas.count} replicas, {name}, {bucket} bytes, mean={mean}, owners={bool(owners)}"
                plain, _ = one_step(replicas, case, bucket, mean=mean, owners=owners, measures=False)
                measured, told = one_step(replicas, case, bucket, mean=mean, owners=owners, measures=True)
                if not all(torch.equal(one, other) for one, other in zip(plain, measured, strict=True)):
                    yield f"{how}: other bits"
                expected = by_force(replicas.count, case, mean=mean)
                if told is None or told.norms is None or not _close(told.norms, expected):
                    yield f"{how}: {told and told.norms} instead of {expected}"
                elif told.samples != tuple(8.0 + one for one in range(replicas.count)):
                    yield f"{how}: samples {told.samples}"


def _close(norms: TermNorms, expected: TermNorms) -> bool:
    return [*norms.terms, norms.mean] == pytest.approx([*expected.terms, expected.mean], rel=1e-7)


@pytest.mark.processes
def test_all_norms_are_those_by_force_and_no_bit_of_a_sum_is_another() -> None:
    results = run_processes(compare, MOST)
    assert [found for found, _ in results] == [[]] * MOST
    assert sum(ahead for _, ahead in results) > 0, "terms were added ahead"


def told_by(columns: Sequence[tuple[tuple[float, float] | None, float]], *, of_sums: bool, mean: bool) -> ToldNorms:
    """What the first replica knows once all have told."""
    replicas = [ToldNorms(index, len(columns), of_sums=of_sums) for index in range(len(columns))]
    for replica, (own, samples) in zip(replicas, columns, strict=True):
        replica.take(own, samples, 2.0)
    told = torch.stack([one.told() for one in replicas]).sum(0)
    replicas[0].meet(told / len(columns) if mean else told, mean=mean)
    return replicas[0]


def test_told_numbers_have_all_their_bits_though_they_travel_as_a_mean() -> None:
    third = 1 / 3
    found = told_by([((4 * third, 1e-300), 5.0), ((4e300, 4 * third), 5.0), ((0.0, 0.0), 5.0)], of_sums=False, mean=True)
    assert found.norms == TermNorms((third, 1e300, 0.0), (1e-300 + 4 * third) / 4) and found.samples == (5.0, 5.0, 5.0)


@pytest.mark.parametrize("wrong", [(None, 5.0), ((float("inf"), 1.0), 5.0), ((1.0, float("nan")), 5.0), ((1.0, 1.0), 0.0)])
def test_what_one_replica_does_not_know_no_replica_takes(wrong: tuple[tuple[float, float] | None, float]) -> None:
    assert told_by([((1.0, 1.0), 5.0), wrong], of_sums=True, mean=False).norms is None


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_norms_have_no_range(size: float) -> None:
    """Squares of float32 have one."""
    gradient = size * torch.randn(5000, generator=torch.Generator().manual_seed(0))
    sums = Accumulators({"weight": torch.zeros(5000, requires_grad=True)})
    norms = SumNorms(["weight"], sums, 0, 2)
    norms.begin_step()
    sums.put("weight", gradient)
    norms.of_terms(["weight"], lambda _: sums.total("weight"))(0)
    norms.end_sum(["weight"], [])
    expected = [one.double().square().sum().item() for one in (gradient, gradient[:2500])]
    assert norms.read() == pytest.approx(tuple(expected), rel=1e-7)


def test_gradients_of_earlier_steps_are_in_no_norm() -> None:
    parameter = torch.zeros(3, requires_grad=True)
    parameter.grad = torch.ones(3)
    sums = Accumulators({"weight": parameter})
    norms = SumNorms(["weight"], sums, 0, 2)
    for aside, known in (((), None), (["weight"], (3.0, 1.0))):
        sums.begin_step(aside)
        norms.begin_step()
        sums.add("weight", torch.tensor([1.0, 1.0, -1.0]))
        norms.of_terms(["weight"], lambda _: sums.total("weight"))(0)
        norms.end_sum(["weight"], [])
        assert norms.read() == known
