"""Which gradients belong to an update that is under way."""

from __future__ import annotations

import torch
from torch import nn

from adaptra.runtime.data_parallel.held_gradients import HeldGradients


def after_a_step(*, unused: bool = False) -> tuple[HeldGradients, list[nn.Parameter]]:
    """Two parameters that a step has filled the gradients of, of which one may be exactly zero, and maybe one without."""
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("zero", "one", *(["unused"] if unused else []))}
    held = HeldGradients(parameters)
    parameters["zero"].grad, parameters["one"].grad = torch.zeros(2), torch.ones(2)
    held.end_step()
    return held, [*parameters.values()]


def test_gradients_are_held_until_an_optimizer_zeroes_them() -> None:
    for to_none in (True, False):
        for unused in (True, False):
            held, parameters = after_a_step(unused=unused)
            assert held.first() == "one"
            torch.optim.SGD(parameters).zero_grad(set_to_none=to_none)
            assert held.first() is None


def test_the_gradient_of_a_parameter_that_no_optimizer_has_is_of_no_update() -> None:
    held, (zero, _) = after_a_step()
    torch.optim.SGD([zero]).zero_grad()
    assert held.first() is None


def test_none_is_held_before_the_first_step() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    assert HeldGradients({"one": parameter}).first() is None
