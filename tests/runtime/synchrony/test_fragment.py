"""A fragment learns what training has changed in its parameters, whatever their precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from adaptra.planning.synchrony.modes import Outer
from adaptra.runtime.synchrony.fragment import Fragment

PLAIN = Outer(lr=0.25, momentum=0.0, nesterov=False)
CHANGE = 2.0**-8
"""What training takes off a parameter between two exchanges: the last place of a bfloat16 number between 0.5 and 1."""


def fragment_of(value: float, dtype: torch.dtype) -> tuple[Fragment, nn.Parameter]:
    parameter = nn.Parameter(torch.tensor([value], dtype=dtype))
    return Fragment({"w": parameter}, ["w"], PLAIN), parameter


def after_of(fragment: Fragment) -> Tensor:
    return fragment.state[0].clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_updates_below_the_precision_of_parameters_add_up(dtype: torch.dtype) -> None:
    fragment, parameter = fragment_of(0.75, dtype)
    for exchange in range(1, 9):
        with torch.no_grad():
            parameter.sub_(CHANGE)
        learnt = fragment.learnt()
        assert [one.item() for one in learnt] == [CHANGE]
        fragment.update(learnt)
        assert after_of(fragment).item() == 0.75 - PLAIN.lr * exchange * CHANGE
        assert torch.equal(parameter.detach(), after_of(fragment).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_site_that_has_trained_on_nothing_has_learnt_nothing(dtype: torch.dtype) -> None:
    fragment, parameter = fragment_of(1.0, dtype)
    fragment.update([torch.full((1,), 0.3)])
    before = parameter.detach().clone()
    assert [one.item() for one in fragment.learnt()] == [0.0]
    fragment.update(fragment.learnt())
    assert torch.equal(parameter.detach(), before)


def test_a_site_that_has_missed_an_exchange_has_learnt_since_its_last_one() -> None:
    (late, of_late), (ahead, _) = fragment_of(1.0, torch.bfloat16), fragment_of(1.0, torch.bfloat16)
    for one in (late, ahead):
        one.update([torch.full((1,), 0.3)])
    ahead.update([torch.full((1,), 0.3)])
    with torch.no_grad():
        of_late.sub_(CHANGE)
    learnt = late.learnt()
    late.take(ahead.state)
    assert [one.item() for one in learnt] == [CHANGE]
    late.update(learnt)
    assert torch.equal(after_of(late), after_of(ahead) - PLAIN.lr * CHANGE)
