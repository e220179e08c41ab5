"""Digests of a captured model's ops are equal for equal code, and name the module whose ops differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adaptra.frontend.arguments.module_digests import module_digests
from adaptra.graph import compile_stages
from adaptra.graph.compile import CompiledStages


class Block(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x))


def digests(then: Callable[[Tensor], Tensor]) -> dict[str, str]:
    model = nn.Sequential(Block(torch.relu), Block(then), Block(torch.relu))
    made: CompiledStages = compile_stages(
        model, (torch.randn(2, 4),), {}, stages=1, loss=nn.functional.mse_loss, targets=torch.randn(2, 4)
    )
    assert made.captured is not None
    return module_digests(made.captured.flat)


def checkpointed(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(lambda y: y * factor, x, use_reentrant=False)  # pyright: ignore[reportReturnType]


def test_the_same_code_has_the_same_digests() -> None:
    assert digests(torch.relu) == digests(torch.relu)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x * 2.0, lambda x: x * 2.0000001),
        (torch.relu, torch.tanh),
        (lambda x: x.softmax(0), lambda x: x.softmax(1)),
        (lambda x: x - x.detach(), lambda x: x.detach() - x),
        (lambda x: x + torch.tensor([1.0, 2, 3, 4]), lambda x: x + torch.tensor([1.0, 2, 3, 5])),
        (lambda x: x.to(torch.float64).float(), lambda x: x.to(torch.bfloat16).float()),
        (checkpointed(1.5), checkpointed(2.5)),
    ],
)
def test_the_module_whose_ops_differ_is_named(one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]) -> None:
    first, second = digests(one), digests(other)
    assert next(name for name in first if first[name] != second.get(name)) == "1"
    assert first["0.layer"] == second["0.layer"] and first["1.layer"] == second["1.layer"]
