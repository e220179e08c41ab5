"""Clipping by the norm of all gradients, over stages, as torch does it in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from errors_table import check_documented
from processes import run_processes
from torch import nn
from training import MIXED, adam, compiled, differences, run_step, train_alone

import adaptra
from adaptra.errors import AdaptraError, TransportError

DOCUMENTED = {
    "early": "no step has run yet: there are no gradients to clip",
    "infinite": "the norm of all gradients is …: expected a finite one, as error_if_nonfinite=True",
    "largest": "max_norm=…: expected a number of at least 0",
    "kind": "norm_type=…: expected a number of at least 1",
}

MICROBATCHES, STEPS = 4, 3
LARGEST = 0.05
"""Below every norm of these steps, so that each is clipped."""


class Clipping:
    """An optimizer that clips before each of its steps."""

    def __init__(self, inner: torch.optim.Optimizer, clip: Callable[[], torch.Tensor]) -> None:
        self.norms: list[torch.Tensor] = []
        self.zero_grad = inner.zero_grad
        self._inner, self._clip = inner, clip

    def step(self) -> None:
        self.norms.append(self._clip())
        self._inner.step()


def clipped_steps(stages: int, norm_type: float) -> tuple[list[str], list[float]]:
    """What differs from plain torch, and the norms."""
    batches = [MIXED.rows(4 * MICROBATCHES, step) for step in range(STEPS)]
    alone: list[Clipping] = []

    def clipping_adam(parameters: Iterable[nn.Parameter]) -> Any:
        given = list(parameters)
        alone.append(Clipping(adam(given), lambda: torch.nn.utils.clip_grad_norm_(given, LARGEST, norm_type)))
        return alone[0]

    expected = train_alone(MIXED, batches, MICROBATCHES, optimizer=clipping_adam)
    with compiled(MIXED, batches[0], stages=stages, microbatches=MICROBATCHES) as pipe:
        ours: Any = Clipping(adam(pipe.parameters()), lambda: pipe.clip_grad_norm_(LARGEST, norm_type))
        steps = [run_step(pipe, ours, batch) for batch in batches]
    found = differences(steps, expected, whole=False)
    found += [f"norm {one} instead of {other}" for one, other in zip(ours.norms, alone[0].norms, strict=True) if one != other]
    return found, [norm.item() for norm in ours.norms]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_clipping_is_bitwise_that_of_one_process(stages: int, norm_type: float) -> None:
    found, norms = clipped_steps(stages, norm_type)
    assert found == []
    assert len(set(norms)) == STEPS and min(norms) > LARGEST


def clip_on_a_rank(_rank: int) -> tuple[list[str], list[float]]:
    torch.distributed.init_process_group("gloo")
    return clipped_steps(3, 2.0)


@pytest.mark.processes
def test_every_rank_of_a_launcher_has_the_norm_of_all() -> None:
    results = run_processes(clip_on_a_rank, 3)
    assert [found for found, _ in results] == [[]] * 3
    assert len({tuple(norms) for _, norms in results}) == 1


@pytest.fixture
def pipe() -> Iterable[adaptra.Pipeline]:
    with compiled(MIXED, MIXED.rows(8, 0), stages=2, microbatches=2) as made:
        yield made


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(AdaptraError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


def test_what_is_no_norm_is_refused(pipe: adaptra.Pipeline) -> None:
    check_documented(*refusal(lambda: pipe.clip_grad_norm_(-1)), DOCUMENTED["largest"])
    nuclear: Any = "nuclear"
    check_documented(*refusal(lambda: pipe.clip_grad_norm_(1.0, nuclear)), DOCUMENTED["kind"])
    check_documented(*refusal(lambda: pipe.clip_grad_norm_(1.0)), DOCUMENTED["early"])


def test_a_norm_that_is_not_finite_changes_nothing_where_that_is_an_error(pipe: adaptra.Pipeline) -> None:
    args, _, targets = MIXED.rows(8, 0)
    pipe.step(args, targets)
    first, second = list(pipe.parameters())[:2]
    assert first.grad is not None and second.grad is not None
    first.grad[0] = float("inf")
    before = second.grad.clone()
    check_documented(*refusal(lambda: pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)), DOCUMENTED["infinite"])
    assert torch.equal(second.grad, before)
    assert pipe.clip_grad_norm_(1.0).isinf()


def test_a_rank_that_waits_for_norms_says_so(pipe: adaptra.Pipeline) -> None:
    """And names no op: it is none that waits, and no microbatch has that number."""
    pipe.step(*MIXED.rows(8, 0)[::2])
    with pytest.raises(TransportError, match=r"^gradient norms of step 0 on edge 1→0 with .*not exchanged within"):
        pipe.session.workers[0]._parts.norms.found_anywhere(0, has_property=False, timeout=0.01)
