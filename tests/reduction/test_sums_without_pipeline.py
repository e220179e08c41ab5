"""Sums over ranks without a pipeline: the bits of a left fold in one process, and lost ranks that all others name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from errors_table import check_documented, error_of
from processes import run_processes
from torch import Tensor, nn

from adaptra import Reduce
from adaptra.collectives.rounds import ALGORITHMS

pytestmark = pytest.mark.processes

RANKS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64)
SIZES = (1, 7, 1000, 33_333)


def terms(size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [(10 * torch.randn(size, generator=generator)).to(dtype) for _ in range(RANKS)]


def fold(tensors: Sequence[Tensor], mean: bool) -> Tensor:
    total = tensors[0]
    for one in tensors[1:]:
        total = total + one
    if not mean:
        return total
    return torch.view_as_complex(torch.view_as_real(total) / len(tensors)) if total.is_complex() else total / len(tensors)


def add(rank: int) -> list[str]:
    """The calls that gave other bits."""
    import torch.distributed as dist

    import adaptra
    from adaptra import reduction

    dist.init_process_group("gloo")
    pair: Any = dist.new_group([0, 2])
    ways = [None, adaptra.Reduce(bucket=4000), adaptra.Reduce(algorithm="chain", bucket=50_000)]
    wrong: list[str] = []

    def check(name: str, result: Tensor, expected: Tensor) -> None:
        if not torch.equal(result, expected):
            wrong.append(name)

    for number, (size, dtype) in enumerate((size, dtype) for size in SIZES for dtype in DTYPES):
        how, mean = ways[number % len(ways)], number % 2 == 1 and dtype is not torch.int64
        name = f"{size} of {dtype}, mean={mean}, {how}"
        given = terms(size * RANKS, dtype)
        own, expected = given[rank].clone(), fold(given, mean)
        reduction.all_reduce(own, mean=mean, how=how)
        check(f"all_reduce of {name}", own, expected)
        part, untouched = torch.empty(size, dtype=dtype), given[rank].clone()
        reduction.reduce_scatter(part, untouched, mean=mean, how=how)
        check(f"reduce_scatter of {name}", part, expected[rank * size : (rank + 1) * size])
        check(f"terms of {name}", untouched, given[rank])
        within = untouched[1 : size + 1]
        reduction.reduce_scatter(within, untouched, mean=mean, how=how)
        check(f"reduce_scatter of {name} over its own terms", within, expected[rank * size : (rank + 1) * size])
        whole = torch.empty(size * RANKS, dtype=dtype)
        reduction.all_gather(whole, part)
        check(f"all_gather of {name}", whole, expected)
        if rank != 1:
            own = given[rank].clone()
            reduction.all_reduce(own, pair, mean=mean)
            check(f"all_reduce of two ranks, {name}", own, fold(given[::2], mean))
    dist.destroy_process_group()
    return wrong


def test_functions_have_the_bits_of_a_left_fold() -> None:
    assert run_processes(add, RANKS) == [[]] * RANKS


NO_GROUP = "a sum over ranks without a process group: expected torch.distributed.init_process_group before it"
NO_MEMBER = "a sum over a group of which this process is no member: expected it on the group's ranks alone"
NO_NUMBERS = "a … over ranks of …: expected a dtype of …"
SPARSE = "… of a …: expected a dense tensor with values; a DTensor has to_local(), a sparse one to_dense()"
NO_PARTS = (
    "… of … and … over … ranks: expected contiguous tensors of one dtype, the first with … times the elements of the second"
)
NOT_SHARDED = "use_in(…): no module was given to fully_shard: expected it to be called before"
OTHER_OP = (
    "reduce_scatter of FSDP2 by …: expected a sum or a mean: where a divide factor is set, call "
    "set_force_sum_reduction_for_comms(True)"
)
FAILED = "a sum over ranks has failed: …"
REFUSED_BY_TORCH = "use_in(…): …"
OTHER = "rank … does: …; rank …: …: expected the same on all ranks of the group"
CLOSED = "a sum over ranks after its end: expected none after close()"
LOST = "rank … is lost…"
AUTO = "Reduce(…): expected algorithm='direct' or 'chain', as only a pipeline's steps tell when ranks come"


def misuse(rank: int) -> list[tuple[str, str]]:
    """The errors of calls that can't be right."""
    import torch.distributed as dist

    from adaptra import reduction

    errors: list[tuple[str, str]] = []

    def refused(call: Callable[[], Any]) -> None:
        errors.append(error_of(call))

    refused(lambda: reduction.all_reduce(torch.ones(3)))
    dist.init_process_group("gloo")
    pair, everyone = dist.new_group([0, 1]), dist.group.WORLD
    assert everyone is not None
    of_two: Any = pair
    refused(lambda: reduction.all_reduce(torch.ones(3, dtype=torch.bool)))
    refused(lambda: reduction.all_reduce(torch.ones(3, dtype=torch.int64), mean=True))
    refused(lambda: reduction.all_reduce(torch.ones(3).to_sparse()))
    refused(lambda: reduction.reduce_scatter(torch.empty(2), torch.ones(7)))
    refused(lambda: reduction.use_in(nn.Linear(2, 2)))
    refused(lambda: reduction.ReduceScatter()(torch.empty(1), torch.ones(3), everyone, dist.ReduceOp.MAX))
    refused(lambda: reduction.HookState(how=Reduce(algorithm="auto")))
    for _ in range(2):
        refused(lambda: reduction.all_reduce(torch.ones(5 if rank == 1 else 4)))
    state = reduction.HookState()
    state.close()
    refused(lambda: state.begin(0, torch.ones(3)))
    if rank == 2:
        refused(lambda: reduction.all_reduce(torch.ones(3), of_two))
    dist.destroy_process_group()
    return errors


def test_what_can_not_be_added_is_refused_in_words() -> None:
    rows = [NO_GROUP, NO_NUMBERS, NO_NUMBERS, SPARSE, NO_PARTS, NOT_SHARDED, OTHER_OP, AUTO, OTHER, OTHER, CLOSED, NO_MEMBER]
    told = run_processes(misuse, RANKS)
    for rank, errors in enumerate(told):
        assert len(errors) == len(rows) - (rank != 2)
        for (kind, text), row in zip(errors, rows, strict=False):
            check_documented(kind, text, row)
        other = errors[rows.index(OTHER)][1]
        assert f"rank {rank} does: all_reduce(float32[{5 if rank == 1 else 4}], mean=False) by {Reduce()};" in other


def model_and_batch(rank: int, step: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)], nn.Linear(64, 3))
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model, torch.randn(8, 64, generator=generator), torch.randn(8, 3, generator=generator)


STEPS = 4


def in_one_process() -> list[Tensor]:
    """The weights after training on the batches of all ranks, by gradients that are folded and divided."""
    model, *_ = model_and_batch(0, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        gradients: list[list[Tensor]] = []
        for rank in range(RANKS):
            _, inputs, targets = model_and_batch(rank, step)
            gradients.append([*torch.autograd.grad((model(inputs) - targets).square().mean(), [*model.parameters()])])
        for parameter, *of_ranks in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = fold(of_ranks, mean=True)
        optimizer.step()
    return [one.detach() for one in model.parameters()]


def train_in_parallel(rank: int, sharded: bool) -> list[list[Any]]:
    """The weights after training by DDP with buckets of two sizes; or twice by FSDP2."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from adaptra import reduction

    dist.init_process_group("gloo")
    results: list[list[Any]] = []
    for megabytes in (0.01, 25):
        model, *_ = model_and_batch(0, 0)
        state, trained = None, model
        if sharded:
            mesh = init_device_mesh("cpu", (RANKS,))
            for layer in [*model, model]:
                fully_shard(layer, mesh=mesh)
            reduction.use_in(model)
        else:
            state, trained = reduction.HookState(), DistributedDataParallel(model, bucket_cap_mb=megabytes)
            trained.register_comm_hook(state, reduction.hook)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            _, inputs, targets = model_and_batch(rank, step)
            optimizer.zero_grad()
            (trained(inputs) - targets).square().mean().backward()
            optimizer.step()
        weights: list[Any] = [*model.parameters()]
        results.append([(one.full_tensor() if sharded else one).detach().numpy().copy() for one in weights])
        if state is not None:
            assert state.error is None
            state.close()
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_training_has_the_bits_of_one_process(sharded: bool) -> None:
    expected = in_one_process()
    for results in run_processes(train_in_parallel, RANKS, sharded):
        for weights in results:
            assert all(torch.equal(torch.from_numpy(one), other) for one, other in zip(weights, expected, strict=True))


Death = tuple[Any, int, int]
"""The algorithm of a sum, its buckets, and how many messages the lost rank had begun before."""

COUNT = 2000
"""Elements of a sum."""


def lose(rank: int, deaths: list[Death], sent: int) -> list[list[tuple[str, int | None]]]:
    """How sums of three ranks end whose second one is lost as it begins some message: by sum, the errors and the ranks named.

    The first and the last rank take part in all of them. What ends a sum ends the next one too.
    """
    import torch.distributed as dist

    import adaptra
    from adaptra import reduction
    from adaptra.errors import PeerLostError
    from adaptra.runtime.data_parallel.collectives.carriers import HostCarrier

    dist.init_process_group("gloo")
    last = len(deaths) + 1
    groups: list[Any] = [dist.new_group([0, lost, last]) for lost in range(1, last)]
    carrier: Any = HostCarrier
    begin, left = carrier.begin, -1

    def begin_or_end(*args: Any) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), sent)
        left -= 1
        begin(*args)

    carrier.begin = begin_or_end
    ends: list[list[tuple[str, int | None]]] = []
    for lost, (group, (algorithm, buckets, begun)) in enumerate(zip(groups, deaths, strict=True), 1):
        if rank not in (0, lost, last):
            continue
        how = adaptra.Reduce(algorithm=algorithm, bucket=4 * COUNT // buckets)
        reduction.all_reduce(torch.ones(3), group, how=how)
        left = begun if rank == lost else -1
        told: list[tuple[str, int | None]] = []
        for _ in range(2):
            tensor = torch.full((COUNT,), float(rank))
            try:
                reduction.all_reduce(tensor, group, how=how)
                assert tensor.eq(lost + last).all(), "a torn sum"
            except PeerLostError as error:
                told.append((str(error), error.rank))
        ends.append(told)
    return ends


def deaths_in(algorithm: str, buckets: int) -> list[Death]:
    """A death at the first message of each round that the second of three ranks takes part in."""
    rounds = [one.round for one in ALGORITHMS[algorithm](RANKS, buckets * RANKS, 1)]
    return [(algorithm, buckets, rounds.index(one)) for one in sorted({*rounds})]


# Buckets of direct sums overlap; those of a chain are parts behind each other, as one has them.
EVERY_DEATH = [*deaths_in("direct", 2), *deaths_in("chain", 1)]
FROZEN = [EVERY_DEATH[number] for number in (0, 5, 8, 13)]
AT_ONCE = 6
"""Deaths in one set of processes."""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named_on_all_others_in_each_round(sent: int) -> None:
    every = EVERY_DEATH if sent == signal.SIGKILL else FROZEN
    for begin in range(0, len(every), AT_ONCE):
        deaths = every[begin : begin + AT_ONCE]
        told = run_processes(lose, len(deaths) + 2, deaths, sent, may_die=tuple(range(1, len(deaths) + 1)))
        for lost, (death, *of_survivors) in enumerate(zip(deaths, told[0], told[-1], strict=True), 1):
            for ends in of_survivors:
                assert ends, f"{death}: a survivor has no error"
                for text, named in ends:
                    check_documented("PeerLostError", text, LOST)
                    assert named == lost, f"{death}: {text}"
                    assert ("has ended" if sent == signal.SIGKILL else "has not answered") in text
