"""A step's gradients stay out of ``grad`` until its end, and their bits are those of autograd's own accumulation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from adaptra.runtime.data_parallel.accumulators import Accumulators

PARTS = [torch.tensor([value, 3.0 * value]) for value in (1e8, 1.0, -1e8, 0.1)]
"""Their sum depends on the order of additions."""

EARLIER = torch.tensor([0.3, -7e7])


def parameter(earlier: Tensor | None = None, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(2, dtype=dtype))
    made.grad = None if earlier is None else earlier.clone()
    return made


def add_all(sums: Accumulators, *, fresh: bool = False) -> None:
    for part in PARTS:
        sums.add("weight", part.clone(), fresh=fresh)


def by_autograd(earlier: Tensor | None) -> Tensor:
    weight = parameter(earlier)
    for part in PARTS:
        torch.autograd.backward([weight], [part.clone()])
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("earlier", [None, EARLIER])
@pytest.mark.parametrize("fresh", [False, True])
def test_the_bits_are_autograds_and_a_grad_changes_only_at_the_end(earlier: Tensor | None, fresh: bool) -> None:
    weight = parameter(earlier)
    held = weight.grad
    sums = Accumulators({"weight": weight})
    sums.begin_step()
    add_all(sums, fresh=fresh)
    assert weight.grad is held
    assert held is None or (earlier is not None and torch.equal(held, earlier))
    sums.fill()
    assert weight.grad is not None and torch.equal(weight.grad, by_autograd(earlier))
    assert held is None or weight.grad is held, "users may hold on to grad, and it may be a view of a larger tensor"


def test_a_step_apart_is_added_as_a_whole() -> None:
    weight = parameter(EARLIER)
    sums = Accumulators({"weight": weight})
    sums.begin_step(aside=["weight"])
    add_all(sums)
    sums.divide(3.0)
    sums.fill()
    expected = EARLIER + by_autograd(None) / 3.0
    assert weight.grad is not None and torch.equal(weight.grad, expected)
    assert not torch.equal(by_autograd(EARLIER) / 3.0, expected)


@pytest.mark.parametrize(
    "end",
    [Accumulators.discard, Accumulators.begin_step, lambda sums: sums.begin_as(None)],
    ids=["discarded", "begun again", "another's"],
)
def test_a_step_that_is_not_ended_leaves_nothing(end: Callable[[Accumulators], None]) -> None:
    weight, new = parameter(EARLIER), parameter()
    sums = Accumulators({"weight": weight, "new": new})
    sums.begin_step()
    add_all(sums)
    sums.add("new", torch.ones(2))
    end(sums)
    sums.fill()
    assert weight.grad is not None and torch.equal(weight.grad, EARLIER) and new.grad is None


def test_a_fresh_gradient_becomes_grad_and_another_is_copied() -> None:
    """It may be a view of a message whose buffer is used again."""
    found: list[tuple[bool, list[float]]] = []
    for fresh in (True, False):
        weight, gradient = parameter(), torch.ones(2)
        sums = Accumulators({"weight": weight})
        sums.begin_step()
        sums.add("weight", gradient, fresh=fresh)
        sums.fill()
        assert weight.grad is not None
        found.append((weight.grad.data_ptr() == gradient.data_ptr(), weight.grad.tolist()))
    assert found == [(True, [1.0, 1.0]), (False, [1.0, 1.0])]


def test_a_grad_has_the_dtype_and_the_strides_of_its_parameter() -> None:
    weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16).t())
    sums = Accumulators({"weight": weight})
    sums.begin_step()
    sums.add("weight", torch.ones(3, 2), fresh=True)
    sums.fill()
    assert weight.grad is not None
    assert (weight.grad.dtype, weight.grad.stride()) == (torch.bfloat16, weight.stride())


def test_sums_go_on_where_others_have_begun_them() -> None:
    """Another worker begins as this one, and what comes from it replaces what this one has."""
    weight = parameter(EARLIER)
    home, away = Accumulators({"weight": weight}), Accumulators({"weight": weight})
    home.begin_step()
    away.begin_as(home)
    for part in PARTS[:2]:
        away.add("weight", part)
    taken = away.take("weight")
    assert taken is not None and away.take("weight") is not taken
    home.put("weight", taken)
    taken.zero_()
    for part in PARTS[2:]:
        home.add("weight", part)
    home.fill()
    assert weight.grad is not None and torch.equal(weight.grad, by_autograd(EARLIER))


def test_a_sum_to_which_nothing_is_added_is_what_it_begins_from() -> None:
    sums = Accumulators({"old": parameter(EARLIER), "new": parameter()})
    sums.begin_step()
    assert sums.take("new") is None
    assert torch.equal(sums.total("old"), EARLIER) and torch.equal(sums.total("new"), torch.zeros(2))
    sums.begin_step()
    handed_over = sums.take("old")
    assert handed_over is not None and torch.equal(handed_over, EARLIER)
    handed_over.zero_()
    assert torch.equal(sums.total("old"), EARLIER), "a message under way is a tensor of its own"


def test_hooks_get_the_sum_once_and_after_all_other_gradients_are_there() -> None:
    first, plain = parameter(EARLIER), parameter()
    seen: list[tuple[Tensor, bool]] = []
    first.register_hook(lambda gradient: seen.append((gradient.clone(), plain.grad is not None)) or gradient * 2)
    sums = Accumulators({"first": first, "plain": plain})
    sums.begin_step(aside=["first"])
    for part in PARTS:
        sums.add("first", part)
        sums.add("plain", part)
    sums.fill(hooked=["first"])
    ((gradient, others_are_there),) = seen
    assert others_are_there and torch.equal(gradient, by_autograd(None))
    assert first.grad is not None and torch.equal(first.grad, EARLIER + gradient * 2)
