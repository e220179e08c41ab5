"""Sums over ranks without a pipeline: the bits of a left fold in one process, and lost ranks that all others name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from errors_table import check_documented
from processes import run_processes
from torch import Tensor, nn

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
NO_NUMBERS = "a … over ranks of …: expected …numbers"
SPARSE = "a sum over ranks of a … tensor: expected a dense one"
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


def misuse(rank: int) -> list[tuple[str, str]]:
    """The errors of calls that can't be right."""
    import torch.distributed as dist

    from adaptra import reduction
    from adaptra.errors import AdaptraError

    errors: list[tuple[str, str]] = []

    def refused(call: Callable[[], Any]) -> None:
        try:
            call()
        except AdaptraError as error:
            errors.append((type(error).__name__, str(error)))

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
    rows = [NO_GROUP, NO_NUMBERS, NO_NUMBERS, SPARSE, NO_PARTS, NOT_SHARDED, OTHER_OP, OTHER, OTHER, CLOSED, NO_MEMBER]
    told = run_processes(misuse, RANKS)
    for rank, errors in enumerate(told):
        assert len(errors) == len(rows) - (rank != 2)
        for (kind, text), row in zip(errors, rows, strict=False):
            check_documented(kind, text, row)
        other = errors[rows.index(OTHER)][1]
        assert f"rank {rank} does: all_reduce(float32[{5 if rank == 1 else 4}], mean=False) by None;" in other


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


def lose(rank: int, number: int, sent: int) -> list[tuple[str, int | None]]:
    """How a sum of two buckets and the next one end, of which rank 1 is lost as it begins some message: error and rank."""
    import torch.distributed as dist

    import adaptra
    from adaptra import reduction
    from adaptra.errors import PeerLostError
    from adaptra.runtime.data_parallel.collectives.carriers import GlooCarrier

    dist.init_process_group("gloo")
    how = adaptra.Reduce(bucket=4000)
    reduction.all_reduce(torch.ones(3), how=how)
    carrier: Any = GlooCarrier
    begin, messages = carrier.begin, 0

    def begin_or_end(*args: Any) -> None:
        nonlocal messages
        if rank == 1 and messages == number:
            os.kill(os.getpid(), sent)
        messages += 1
        begin(*args)

    carrier.begin = begin_or_end
    ends: list[tuple[str, int | None]] = []
    for _ in range(2):
        tensor = torch.full((2000,), float(rank))
        try:
            reduction.all_reduce(tensor, how=how)
            assert tensor.eq(3.0).all(), "a torn sum"
        except PeerLostError as error:
            ends.append((str(error), error.rank))
    return ends


MESSAGES = (0, 1, 3, 6, 9, 12, 15)
"""Some of the 16 that one of three ranks begins for two buckets, with the first and the last."""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named_on_all_others(sent: int) -> None:
    for number in MESSAGES if sent == signal.SIGKILL else (0, 9):
        told = run_processes(lose, RANKS, number, sent, may_die=(1,))
        for text, lost in (*told[0], *told[2]):
            check_documented("PeerLostError", text, LOST)
            assert lost == 1
            assert ("has ended" if sent == signal.SIGKILL else "has not answered") in text
        assert told[0] and told[2]
