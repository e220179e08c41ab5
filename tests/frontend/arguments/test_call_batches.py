"""Batches that a function gives: what it returns is what step takes, and a batch given beside it is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from errors_table import check_documented
from torch import Tensor, nn

import adaptra
from adaptra.errors import AdaptraError


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)


def by_name(step: int, replica: int) -> dict[str, Tensor]:
    inputs, targets = batch(step, replica)
    return {"input": inputs, "targets": targets}


def compiled(batches: Any, **arguments: Any) -> adaptra.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return adaptra.compile(model, stages=2, microbatches=2, loss=nn.functional.mse_loss, batches=batches, **arguments)


def test_steps_take_the_batches_of_their_number() -> None:
    """With an example and without; as a tuple and by name."""
    with compiled(None) as pipe:
        losses = [pipe.step(*batch(step, 0)) for step in range(3)]
        evaluated = pipe.eval_step(*batch(7, 0))
    for function, example in ((batch, batch(0, 0)), (batch, None), (by_name, None)):
        with compiled(function, example_inputs=example) as pipe:
            found = [pipe.step(), pipe.step(*batch(1, 0)) if function is batch else pipe.step(), pipe.step()]
            assert all(map(torch.equal, found, losses))
            assert torch.equal(pipe.eval_step(lambda replica: batch(7, replica)), evaluated)


MISTAKES: dict[str, tuple[str, Any]] = {
    "batches=…: expected a function of (step, replica) that returns the batch, or None": ("OptionError", 3),
    "… returned None: expected inputs, (inputs, targets), or a dict of the step's arguments": ("BatchError", lambda *_: None),
    "…: a tuple of …: expected inputs alone or (inputs, targets); several inputs are a tuple of their own, as in "
    "((first, second), targets)": ("BatchError", lambda *_: (1, 2, 3)),
    "step: … is not what … returned: expected the same, or pipe.step() without a batch": ("BatchError", batch),
}


@pytest.mark.parametrize(("row", "kind", "function"), [(row, *mistake) for row, mistake in MISTAKES.items()])
def test_what_is_no_batch_is_refused_in_words(row: str, kind: str, function: Any) -> None:
    with pytest.raises(AdaptraError) as refusal, compiled(function) as pipe:
        pipe.step(*batch(1, 0)) if function is batch else pipe.step()
    check_documented(kind, str(refusal.value), row)
    assert type(refusal.value).__name__ == kind


def test_a_function_of_the_replica_is_given_alone() -> None:
    with compiled(batch) as pipe, pytest.raises(AdaptraError) as refusal:
        pipe.step()
        pipe.eval_step(lambda replica: batch(0, replica), torch.zeros(4, 8))
    row = "eval_step: a function of the replica beside other arguments: expected it alone"
    check_documented("BatchError", str(refusal.value), row)
