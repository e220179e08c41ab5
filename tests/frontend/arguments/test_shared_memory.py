"""Tensors over one memory stay one in a process of threads, and are refused where ranks would part them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_backend import caught
from errors_table import check_documented
from torch import Tensor, nn

import adaptra
from adaptra.frontend.arguments.shared_memory import refuse_shared_memory
from adaptra.graph import compile_stages
from adaptra.graph.effects.shared_memory import overlapping
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.membership.process_membership import ProcessMembership
from adaptra.runtime.world.world import ProcessId, World

PARTED = (
    "model: … and … are two tensors over one memory and would …, which training makes differ: expected one Parameter under "
    "both names, which ties them, or a clone() for one of them"
)
MOVED = (
    "…: … and … are two tensors over one memory, which would part where they move between ranks: expected one Parameter under "
    "both names, which ties them, or a clone() for one of them"
)


class Two(nn.Module):
    def __init__(self, share: Callable[[Tensor], Tensor], kind: type = nn.Parameter) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        del self.b.weight
        made = share(self.a.weight.data)
        if kind is nn.Parameter:
            self.b.weight = nn.Parameter(made)
        else:
            self.b.register_buffer("weight", made)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


SHARED: dict[str, Callable[[], Two]] = {
    "data": lambda: Two(lambda weight: weight),
    "transposed": lambda: Two(lambda weight: weight.t()),
    "a row, expanded": lambda: Two(lambda weight: weight[2:3].expand(4, 4)),
    "a buffer": lambda: Two(lambda weight: weight, Tensor),
}


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4), torch.randn(4, 4)


def compiled(model: nn.Module, given: Any = None) -> adaptra.Pipeline:
    loss = nn.functional.mse_loss
    return adaptra.compile(model, stages=2, microbatches=2, example_inputs=given or batch(), loss=loss, split=["b"])


@pytest.mark.parametrize("kind", ["data", "transposed", "a buffer"])
def test_threads_share_the_memory_as_plain_torch_does(kind: str) -> None:
    model, plain = SHARED[kind](), SHARED[kind]()
    plain.load_state_dict(model.state_dict())
    inputs, targets = batch()
    with compiled(model) as pipe:
        optimizers = [torch.optim.Adam(one.parameters(), 0.1) for one in (pipe, plain)]
        for _ in range(3):
            pipe.step(inputs, targets)
            for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
                (nn.functional.mse_loss(plain(x), y) / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        error = caught(lambda: pipe.take_split(["c"], optimizers[0]))
        check_documented(type(error).__name__, str(error), MOVED)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_an_empty_model_would_part_them_anywhere() -> None:
    with torch.device("meta"):
        model = SHARED["data"]()
    error = caught(lambda: compiled(model))
    check_documented(type(error).__name__, str(error), PARTED)
    assert "'a.weight' and 'b.weight'" in str(error)


@pytest.mark.parametrize("kind", [*SHARED, "apart"])
def test_ranks_of_several_processes_refuse_them_with_both_names(kind: str) -> None:
    flat = torch.randn(32)
    model = SHARED[kind]() if kind in SHARED else Two(lambda weight: weight.clone())
    if kind == "apart":
        model.a.weight, model.b.weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))
    inputs, targets = batch()
    stages = compile_stages(model, (inputs,), {}, stages=2, loss=nn.functional.mse_loss, targets=targets, split=["b"])
    world = World(0, 2, (ProcessId(0), ProcessId(1)), (0, 0))
    several: Any = Launch((), world, ProcessId(0), ProcessMembership(), Any, Any, Any, Any)  # type: ignore[arg-type]  # only the world counts
    refuse_shared_memory(model, stages, (0, 0), several, is_empty=False)
    if kind == "apart":
        refuse_shared_memory(model, stages, (0, 1), several, is_empty=False)
        return
    error = caught(lambda: refuse_shared_memory(model, stages, (0, 1), several, is_empty=False))
    check_documented(type(error).__name__, str(error), PARTED)
    assert "'a.weight' and 'b.weight'" in str(error) and "ranks 0, 1" in str(error)


def test_what_has_an_element_in_common_is_found_and_nothing_else() -> None:
    flat = torch.zeros(64)
    matrix = flat[:32].view(4, 8)
    cases: list[tuple[list[Tensor], int]] = [
        ([flat[:8], flat[8:16], flat[16:]], 0),
        ([flat[:9], flat[8:16]], 1),
        ([matrix[:, ::2], matrix[:, 1::2]], 0),
        ([matrix[:, :4], matrix[:, 4:]], 0),
        ([matrix[:, :5], matrix[:, 4:]], 1),
        ([matrix, matrix.t()], 1),
        ([matrix[1:2].expand(4, 8), matrix.t()], 1),
        ([matrix[1:2].expand(4, 8), matrix[::2]], 0),
        ([matrix, flat.view(torch.int16)[63:70]], 1),
        ([matrix, flat.view(torch.int16)[64:70]], 0),
        ([matrix[:, 0], flat[1:8]], 0),
        ([flat, flat[3:4], flat[60:]], 2),
        ([flat[:0], flat[:0]], 0),
        ([flat, flat.clone()], 0),
        ([nn.Parameter(flat), flat], 1),
    ]
    for tensors, expected in cases:
        assert len(list(overlapping({str(at): one for at, one in enumerate(tensors)}))) == expected, tensors
    assert list(overlapping({"a": flat, "b": flat})) == [], "two names of one tensor"
