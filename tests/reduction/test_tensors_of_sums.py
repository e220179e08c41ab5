"""Which tensors are added: views that negate or conjugate, halves and whole numbers. Others are refused before they meet."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from errors_table import check_documented, error_of
from processes import run_processes
from torch import Tensor, nn

from adaptra import Reduce

pytestmark = pytest.mark.processes

NO_DTYPE = "a … over ranks of …: expected a dtype of …"
NOT_DENSE = "… of a …: expected a dense tensor with values; a DTensor has to_local(), a sparse one to_dense()"
SHARED = "… in … whose elements share memory, as expand() leaves them: expected a tensor that can be written; clone() makes one"
INFERENCE = "… in … which was made within torch.inference_mode(): expected a tensor that can be written; clone() makes one"

IN_FLOAT32 = Reduce(dtype=torch.float32)
CHAIN_IN_FLOAT32 = Reduce(dtype=torch.float32, algorithm="chain")
LARGE = 2**24 + 1
"""A whole number that float32 doesn't have."""


def plain(tensor: Tensor) -> Tensor:
    resolved = tensor.resolve_conj().resolve_neg().clone()
    # torch doesn't compare complex halves.
    return torch.view_as_real(resolved) if tensor.is_complex() else resolved


def negated(values: Tensor) -> Tensor:
    return torch._neg_view(values)  # pyright: ignore[reportPrivateUsage] - as .imag of a conjugated tensor, but contiguous


def add(rank: int) -> list[str]:
    """The sums that are not those of the plain values."""
    import torch.distributed as dist

    from adaptra import reduction

    dist.init_process_group("gloo")
    made: dict[str, Callable[[int], Tensor]] = {
        "negated": lambda of: negated(torch.arange(4.0) + of),
        "negated on one rank": lambda of: torch.arange(4.0) if of else negated(torch.arange(4.0)),
        "one of conj().imag": lambda of: torch.tensor([complex(1, 2 + of)]).conj().imag,
        "conj().imag": lambda of: torch.tensor([1 + 2j * of] * 4).conj().imag,
        "conjugated": lambda of: torch.tensor([1 + 2j, 3 + 4j * of]).conj(),
    }
    wrong: list[str] = []

    def check(name: str, result: Tensor, expected: Tensor) -> None:
        if not torch.equal(plain(result), expected):
            wrong.append(f"{name}: {result}, expected {expected}")

    for name, make in made.items():
        terms = [plain(make(of)) for of in range(2)]
        total = terms[0] + terms[1]
        own = make(rank)
        reduction.all_reduce(own)
        check(f"all_reduce, {name}", own, total)
        if make(0).is_contiguous() and total.numel() > 1:
            count = make(0).numel() // 2
            part = make(rank)[:count]
            reduction.reduce_scatter(part, make(rank))
            check(f"reduce_scatter, {name}", part, total[rank * count : (rank + 1) * count])
            whole = torch.cat([make(rank)] * 2)
            whole = whole.conj() if whole.is_complex() else negated(whole)
            reduction.all_gather(whole, make(rank))
            check(f"all_gather, {name}", whole, torch.cat(terms))
    # Sums that overflow where the mean does not.
    for dtype in (torch.float16, torch.complex32):
        for how in (None, Reduce(algorithm="chain")):
            high = torch.full((3,), 40_000.0 + 32 * rank, dtype=dtype)
            reduction.all_reduce(high, mean=True, how=how)
            check(f"mean of {dtype}", high, plain(torch.full((3,), 40_016.0).to(dtype)))
    high = torch.full((3,), 40_000.0, dtype=torch.float16)
    reduction.all_reduce(high)
    check("sum of float16", high, torch.full((3,), torch.inf, dtype=torch.float16))
    # A dtype of additions is for fractions.
    for dtype in (torch.int32, torch.int64):
        for how in (IN_FLOAT32, CHAIN_IN_FLOAT32):
            whole = torch.full((4,), LARGE, dtype=dtype)
            reduction.all_reduce(whole, how=how)
            check(f"sum of {dtype}", whole, torch.full((4,), 2 * LARGE, dtype=dtype))
        part = torch.empty(2, dtype=dtype)
        reduction.reduce_scatter(part, torch.full((4,), LARGE, dtype=dtype), how=IN_FLOAT32)
        check(f"part of a sum of {dtype}", part, torch.full((2,), 2 * LARGE, dtype=dtype))
    with torch.inference_mode():
        own = torch.ones(3)
        reduction.all_reduce(own)
    check("a sum of inference", own, torch.full((3,), 2.0))
    dist.destroy_process_group()
    return wrong


def test_sums_are_those_of_the_values() -> None:
    assert run_processes(add, 2) == [[]] * 2


def refuse(rank: int) -> tuple[list[tuple[str, str]], list[bool], list[float]]:
    """The errors of tensors that can't be added; whether hooks keep theirs; and a sum of the same group behind them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    from adaptra import reduction

    dist.init_process_group("gloo")
    errors: list[tuple[str, str]] = []

    def refused(call: Callable[[], Any]) -> None:
        errors.append(error_of(call))

    warnings.simplefilter("ignore")
    sharded = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    with torch.inference_mode():
        of_inference = torch.ones(4)
    dense = torch.ones(4)
    others: list[Any] = [
        *([1.0], sharded, dense.to_sparse(), torch.ones(4, device="meta")),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ]
    for dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn):
        refused(lambda dtype=dtype: reduction.all_reduce(torch.ones(4).to(dtype)))
        refused(lambda dtype=dtype: reduction.reduce_scatter(torch.ones(2).to(dtype), torch.ones(4).to(dtype)))
    refused(lambda: reduction.all_reduce(torch.ones(3, dtype=torch.int64), mean=True))
    for other in others:
        refused(lambda other=other: reduction.all_reduce(other))
        refused(lambda other=other: reduction.reduce_scatter(dense, other))
        refused(lambda other=other: reduction.reduce_scatter(other, dense))
        refused(lambda other=other: reduction.all_gather(other, dense))
        refused(lambda other=other: reduction.all_gather(dense, other))
    shared = torch.ones(1).expand(4)
    for tensor in (shared, of_inference):
        refused(lambda tensor=tensor: reduction.all_reduce(tensor))
        refused(lambda tensor=tensor: reduction.reduce_scatter(tensor[:2], dense))
        refused(lambda tensor=tensor: reduction.all_gather(tensor, dense[:2]))
    kept: list[bool] = []
    state = reduction.HookState()
    refused(lambda: state.begin(0, of_inference))
    with torch.inference_mode():
        refused(lambda: state.begin(0, of_inference))
    kept.append(str(state.error) == errors[-1][1])
    state.close()
    embedding = nn.Embedding(10, 4, sparse=True)
    ddp = DistributedDataParallel(embedding)
    state = reduction.HookState()
    ddp.register_comm_hook(state, reduction.hook)
    with suppress(Exception):
        ddp(torch.tensor([1, 2])).sum().backward()
    kept.append("torch.sparse_coo" in str(state.error))
    state.close()
    reduction.all_reduce(dense)
    dist.destroy_process_group()
    return errors, kept, dense.tolist()


def test_tensors_that_can_not_be_added_are_refused_before_they_meet() -> None:
    rows = [*[NO_DTYPE] * 11, *[NOT_DENSE] * 30, *[SHARED] * 3, *[INFERENCE] * 5]
    for errors, kept, dense in run_processes(refuse, 2):
        assert len(errors) == len(rows), errors
        for (kind, text), row in zip(errors, rows, strict=True):
            assert kind == "BatchError"
            check_documented(kind, text, row)
        assert kept == [True, True]
        assert dense == [2.0] * 4


def scale(rank: int) -> list[list[float]]:
    """Gradients of two replicas of two shards, for several divide factors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from adaptra import reduction

    dist.init_process_group("gloo")
    mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    gradients: list[list[float]] = []
    for factor, forces_sums, dtype in SCALES:
        model: Any = nn.Linear(2, 2, bias=False)
        fully_shard(model, mesh=mesh["shard"], mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        if rank % 2:  # before or behind it
            reduction.use_in(model, replicas=mesh["replica"].get_group())
        model.set_force_sum_reduction_for_comms(forces_sums)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        if rank % 2 == 0:
            reduction.use_in(model, replicas=mesh["replica"].get_group())
        model(torch.full((1, 2), 12.0 * 2**rank)).sum().backward()
        gradients.append(model.weight.grad.full_tensor().flatten().tolist())
    dist.destroy_process_group()
    return gradients


SCALES: list[tuple[float | None, bool, torch.dtype]] = [
    (None, False, torch.float32),
    (None, True, torch.float32),
    (3.0, True, torch.float32),
    (2.0, False, torch.float32),
    (3.0, False, torch.float16),
]


def test_a_divide_factor_is_in_place_of_the_mean_over_replicas() -> None:
    for gradients in run_processes(scale, 4):
        assert gradients == [[12.0 * 15 / (factor or 4)] * 4 for factor, *_ in SCALES]
