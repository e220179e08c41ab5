"""Hooks of all modules, as torch.nn.modules.module registers them, see the user's modules and none of adaptra's."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

import adaptra

Register = Callable[[Callable[..., Any]], Any]
X = torch.randn(8, 4)


class Summed(nn.Module):
    """A loss for ``reduction="weighted"``."""

    def forward(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return (outputs - targets).square().sum(), targets.numel()


def layers() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)]


@pytest.fixture(params=[modules.register_module_forward_hook, modules.register_module_forward_pre_hook])
def seen(request: pytest.FixtureRequest) -> Generator[set[type]]:
    found: set[type] = set()

    def note(module: nn.Module, *_: Any) -> None:
        found.add(type(module))

    handle = request.param(note)
    yield found
    handle.remove()


def train(model: Any, **how: Any) -> None:
    with adaptra.compile(
        model, stages=2, microbatches=2, example_inputs=(X, X), loss=Summed(), reduction="weighted", **how
    ) as pipe:
        pipe.step(X, X)
        pipe.eval_step(X, X)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_captured_model(seen: set[type], inner: str) -> None:
    before = [dict(one) for one in (modules._global_forward_hooks, modules._global_forward_pre_hooks)]  # pyright: ignore[reportPrivateUsage]
    train(nn.Sequential(*layers()), options=adaptra.Options(inner=inner))
    assert seen == {nn.Sequential, nn.Linear, nn.Tanh, Summed}
    assert before == [modules._global_forward_hooks, modules._global_forward_pre_hooks]  # pyright: ignore[reportPrivateUsage]


def test_a_list_of_stages(seen: set[type]) -> None:
    train(layers())
    assert seen == {nn.Sequential, nn.Linear, nn.Tanh, Summed}


def test_what_a_hook_returns_is_part_of_the_graph() -> None:
    def doubled(module: nn.Module, _: Any, result: Any) -> Any:
        return 2 * result if isinstance(module, nn.Linear) else None

    torch.manual_seed(0)
    model = nn.Sequential(*layers())
    handle = modules.register_module_forward_hook(doubled)
    try:
        expected = model(X)
        with adaptra.compile(model, stages=2, microbatches=2, example_inputs=(X, X), loss=nn.functional.mse_loss) as pipe:
            assert torch.allclose(pipe.eval_step(X), expected)
            pipe.step(X, X)
    finally:
        handle.remove()
