"""The shapes of steps' batches: what all ranks agree on, and what of one rank depends on the shape.

All shapes of a pipeline share its parameters, transports, controller and step counter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from adaptra.graph import CompiledStages
from adaptra.program import Program
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.detection.shape_scales import RelativeSizes
from adaptra.runtime.step_messages.loss_broadcast import LossBroadcast
from adaptra.runtime.worker.stages.stage import Stage
from adaptra.runtime.worker.step.program_messages import MessageShapes

FIRST: Final = 0
"""The number of the shape for which the pipeline was compiled."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """A shape of a step's batch.

    Attributes:
        number: Its number in this process.
        code: Its code in messages, equal on all ranks; 0 for the first.
        rows: The rows of each microbatch; the first ones may have one more than the others.
        larger: The stages of the first microbatches.
        smaller: The stages of the others; None if all microbatches have the same number of rows.
        program_for: Returns the program of the shape under an agreed plan. It has no time limit, so all ranks find the same.
        relative: The estimated time of each stage's ops, relative to the shape for which the pipeline was compiled.
    """

    number: int
    code: int
    rows: tuple[int, ...]
    larger: CompiledStages
    smaller: CompiledStages | None
    program_for: Callable[[Plan], Program]
    relative: tuple[float, ...]

    @property
    def trains(self) -> bool:
        """Whether steps can run it, and not only evaluations."""
        return self.larger.trains and (self.smaller is None or self.smaller.trains)

    @property
    def evaluates(self) -> bool:
        """Whether evaluations can run it, and not only steps."""
        return self.larger.evaluates and (self.smaller is None or self.smaller.evaluates)

    @property
    def with_loss(self) -> bool:
        """Whether its stages return the loss too, and not only the model's outputs."""
        return self.larger.with_loss and (self.smaller is None or self.smaller.with_loss)

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return len(self.rows)

    @property
    def count(self) -> int | None:
        """The number of larger microbatches; None if all have the same number of rows."""
        return None if self.smaller is None else self.rows.count(self.rows[0])

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each microbatch in the batch's rows; empty if all have the same."""
        return () if self.smaller is None else tuple(one / sum(self.rows) for one in self.rows)

    @property
    def tokens(self) -> tuple[int, str] | None:
        """The tokens of a batch, and the label of the input that they are counted in; None without such an input.

        It is the first input of whole numbers in two dimensions. Its rows times its length count, padding included.
        """
        inputs = self.larger.inputs
        for label, spec in zip(inputs.labels, inputs.specs, strict=True):
            is_whole = not (spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype is torch.bool)
            if is_whole and len(spec.shape) == 2:
                return sum(self.rows) * spec.shape[1], label
        return None

    def messages(self, of: Callable[[CompiledStages], list[MessageShapes]]) -> list[MessageShapes]:
        """Return the messages of every stage. ``of`` returns those of microbatches of one size."""
        larger = of(self.larger)
        if self.smaller is None:
            return larger
        return [
            MessageShapes(one.forward, one.backward, one.weights, one.buffers, self.count, (other.forward, other.backward))
            for one, other in zip(larger, of(self.smaller), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class RankShape:
    """What of one rank depends on the shape of a step's batch, beside its programs.

    Attributes:
        shape: The shape.
        stages: The rank's stages in training, by number; none if the shape is only evaluated.
        losses: Broadcasts the losses.
        sizes: What is estimated of it, relative to the shape for which the pipeline was compiled. None if its steps can't be
            compared: microbatches are of two sizes, or of another number.
    """

    shape: StepShape
    stages: Mapping[int, Stage]
    losses: LossBroadcast
    sizes: RelativeSizes | None
