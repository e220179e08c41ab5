"""Changes that alter only how shapes evaluate that no step has had."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from torch import Tensor, nn

import adaptra

FEW = 2
"""Microbatches of fewer rows are computed in another way."""


class Rowwise(nn.Module):
    """Reads a number, a plain tensor and a flag, but for few rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 1.0
        self.mask = torch.ones(4)
        self.signed = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if x.shape[0] < FEW:
            hidden = hidden * self.scale * self.mask
            return -hidden if self.signed else hidden
        return hidden.tanh()


class OfFewRows:
    """A loss that reads a number for few rows only."""

    def __init__(self) -> None:
        self.beta = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(outputs, targets)
        return loss * self.beta if outputs.shape[0] < FEW else loss


class Trained:
    """A pipeline that has trained on one shape and has evaluated another."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(Rowwise(), Rowwise())
        self.loss = OfFewRows()
        self.inputs, self.targets = torch.randn(8, 4), torch.randn(8, 4)
        self.pipe = adaptra.compile(
            self.model, stages=2, microbatches=2, example_inputs=(self.inputs, self.targets), loss=self.loss
        )

    def check(self, rows: int) -> None:
        """Evaluate with and without a loss, and compare with the model itself."""
        x, y = self.inputs[:rows], self.targets[:rows]
        with torch.no_grad():
            outputs = [self.model(one) for one in x.chunk(2)]
            losses = [self.loss(one, other) for one, other in zip(outputs, y.chunk(2), strict=True)]
        assert torch.equal(self.pipe.eval_step(x), torch.cat(outputs)), rows
        assert torch.equal(self.pipe.eval_step(x, y), torch.stack(losses).mean()), rows


@pytest.fixture
def trained() -> Generator[Trained]:
    found = Trained()
    with found.pipe:
        yield found


@pytest.mark.parametrize("place", ["scale", "mask", "signed", "loss"])
def test_a_change_that_only_another_shapes_evaluation_reads_is_followed(trained: Trained, place: str) -> None:
    trained.check(2)
    trained.check(6)
    match place:
        case "loss":
            trained.loss.beta = 0.5
        case "mask":
            trained.model[1].mask = torch.arange(4.0)
        case _:
            setattr(trained.model[0], place, 3.0)
    trained.check(2)
    trained.check(6)
    trained.pipe.step(trained.inputs, trained.targets)


def test_a_plain_tensor_of_another_shapes_evaluation_is_followed_in_place_after_an_equal_one(trained: Trained) -> None:
    trained.check(2)
    trained.model[0].mask = torch.ones(4)
    trained.check(2)
    trained.model[0].mask.fill_(2.0)
    trained.check(2)


def test_a_plain_tensor_that_changes_in_place_is_followed_by_shapes_compiled_before_and_after(trained: Trained) -> None:
    trained.check(2)
    trained.model[0].mask.fill_(2.0)
    trained.check(2)
    trained.model[0].mask.mul_(2.0)
    x, y = trained.inputs[:2], trained.targets[:2]
    loss = trained.pipe.step(x, y)
    assert torch.equal(
        loss,
        torch.stack([F.mse_loss(trained.model(one), other) for one, other in zip(x.chunk(2), y.chunk(2), strict=True)]).mean(),
    )
    assert not [one for one in trained.pipe.events if "a changed model" in one.text]


def test_what_no_shape_reads_restarts_nothing_and_forgets_nothing(trained: Trained) -> None:
    trained.check(2)
    (worker, *_) = trained.pipe.session.workers
    shapes = trained.pipe.shapes
    trained.model[0].best = 0.5
    trained.pipe.step(trained.inputs, trained.targets)
    assert trained.pipe.session.workers[0] is worker
    assert [one.name for one in trained.pipe.shapes] == [one.name for one in shapes]
    trained.check(2)


def test_a_shape_that_can_no_longer_be_evaluated_ends_no_step(trained: Trained) -> None:
    trained.check(2)
    trained.model[0].scale = "wrong"
    trained.pipe.step(trained.inputs, trained.targets)
    with pytest.raises(adaptra.errors.BatchError, match="can't be compiled for this shape"):
        trained.pipe.eval_step(trained.inputs[:2])
