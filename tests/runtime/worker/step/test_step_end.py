"""A step changes ``grad`` and runs hooks only when all else of it has succeeded; what fails before can run again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adaptra
from adaptra.errors import AdaptraError
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.launch.launch import HOST
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.options.reduce_options import Reduce
from adaptra.runtime.worker.ends.replica_losses import ReplicaLosses
from adaptra.runtime.worker.ends.step_end import AllAtOnce, Certificate, Contribution
from adaptra.runtime.worker.stages.loss_reduction import Reduction
from adaptra.runtime.world.world import WorkerId, World

EARLIER = torch.tensor([0.1, 1e8])
PARTS = [torch.tensor([0.3, -1e8]), torch.tensor([0.7, 3.0])]


class Rank:
    """One rank without replicas, whose parameters have an earlier gradient; one of them has a hook."""

    def __init__(self, reduction: Reduction) -> None:
        self.parameters = {name: nn.Parameter(torch.zeros(2)) for name in ("plain", "hooked")}
        for one in self.parameters.values():
            one.grad = EARLIER.clone()
        self.given: list[Tensor] = []
        self.parameters["hooked"].register_hook(lambda gradient: self.given.append(gradient.clone()))
        losses = ReplicaLosses(Replicas(World.of_threads(1), WorkerId(0), "", HOST), reduction, len(PARTS))
        self.end = AllAtOnce(self.parameters, (), (), losses, Reduce(), Monitor(0, (0,)), time.monotonic)

    def run(self, losses: Tensor) -> Certificate:
        """A step up to its certificate."""
        self.end.begin()
        with self.end.adding():
            for part in PARTS:
                for name in self.parameters:
                    self.end.sums.add(name, part.clone())
        self.end.reduce()
        return self.end.certify(Contribution(0, (1,) * len(PARTS), losses))

    @property
    def gradients(self) -> list[Tensor]:
        return [one.grad.clone() for one in self.parameters.values() if one.grad is not None]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize("again", [0, 2])
def test_nothing_changes_before_the_commit_and_a_step_may_run_again(reduction: Reduction, again: int) -> None:
    """Under a mean the microbatches are added to the earlier gradients one by one, else as a whole, as to those of hooks."""
    rank = Rank(reduction)
    losses = torch.tensor([[1.0, 1.0], [2.0, 2.0]]) if reduction is Reduction.WEIGHTED else torch.tensor([1.0, 2.0])
    for _ in range(again):
        rank.run(losses)
    certificate = rank.run(losses)
    assert same(rank.gradients, [EARLIER, EARLIER]) and not rank.given
    assert certificate.losses is losses
    rank.end.commit(certificate)
    divisor = 3.0 if reduction is Reduction.WEIGHTED else 1.0
    apart = (PARTS[0] + PARTS[1]) / divisor
    one_by_one = EARLIER + PARTS[0] + PARTS[1]
    assert not torch.equal(one_by_one, EARLIER + apart)
    assert same(rank.gradients, [one_by_one if reduction is Reduction.MEAN else EARLIER + apart, EARLIER + apart])
    assert same(rank.given, [apart])


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf")])
def test_a_step_without_weight_has_no_gradients(weight: float) -> None:
    rank = Rank(Reduction.WEIGHTED)
    certificate = rank.run(torch.tensor([[1.0, weight], [2.0, 0.0]]))
    assert not certificate.has_gradients
    rank.end.commit(certificate)
    assert same(rank.gradients, [EARLIER, EARLIER]) and not rank.given


@pytest.fixture
def trained() -> Iterator[tuple[adaptra.Pipeline, Any]]:
    tokens = torch.arange(8).reshape(8, 1)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.flatten(1) - targets).square().mean()

    example = (tokens, torch.zeros(8, 4))
    with adaptra.compile(model, stages=2, microbatches=4, example_inputs=example, loss=loss) as pipe:
        yield pipe, example


def test_a_step_that_fails_leaves_earlier_gradients_as_they_were(trained: tuple[adaptra.Pipeline, Any]) -> None:
    """The last microbatch fails when others have been through their W."""
    pipe, (tokens, targets) = trained
    pipe.step(tokens, targets)
    before = {name: (one.grad, one.grad.clone()) for name, one in pipe.named_parameters() if one.grad is not None}
    assert len(before) == 3
    tokens[-1] = 999
    with pytest.raises((AdaptraError, IndexError)):
        pipe.step(tokens, targets)
    for name, one in pipe.named_parameters():
        held, values = before[name]
        assert one.grad is held and torch.equal(held, values), name
