"""Deadlines: once a share of a step's microbatches is begun, replicas begin no more. The others come first in the next step.

Each replica runs its pipeline's program with an open tail, see :mod:`adaptra.program.open_tail`. The first slots hold what was
deferred to the step, then follow the step's own microbatches as they are admitted. Inputs and targets of what is left are kept.
A microbatch has its own random numbers, whichever step computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.synchrony.deferral import Deferral
from adaptra.runtime.synchrony.slots import SlotMicrobatch, Slots
from adaptra.runtime.worker.stages.open_microbatches import Batch, OpenMicrobatches
from adaptra.runtime.worker.stages.stage import TrainingStage


class DeferredMicrobatches(OpenMicrobatches):
    """One rank's part. Used by the thread that runs the steps.

    Args:
        deferral: What is deferred, of all replicas.
        microbatches: The number of microbatches of each in a step.
        slots: What the slots of its pipeline hold.
        stage: This rank's stage.

    Attributes:
        deferral: As given.
    """

    event = EventKind.DEFERRED

    def __init__(self, deferral: Deferral, microbatches: int, slots: Slots, stage: TrainingStage) -> None:
        super().__init__(deferral.replica, slots)
        self.deferral: Final = deferral
        self._microbatches = microbatches
        self._stage = stage
        self._kept: tuple[Mapping[int, Sequence[Tensor]], Mapping[int, Sequence[Tensor]]] = {}, {}
        self._batch: tuple[Batch, Batch] = (), ()

    @property
    def first(self) -> int:
        """The number of the next step's first microbatch of this replica: negative if any was deferred."""
        return -self.deferral.deferred[self._replica]

    def begin_step(
        self, step: int, inputs: Batch, targets: Batch, loss_scale: float, steps_before: int, *, is_open: bool
    ) -> None:
        """Begin a step, see :class:`OpenMicrobatches`."""
        self._batch = inputs, targets
        is_replayed = self.deferral.replayed is not None
        is_open = is_replayed or (is_open and not self.deferral.defers_nothing)
        self.slots.begin_step(step, range(self.first, 1), is_open=is_open)

    def stage_of(self, held: SlotMicrobatch) -> TrainingStage:
        """Return the stage that computes what a slot holds."""
        return self._stage

    def inputs_of(self, held: SlotMicrobatch, own: Batch) -> Sequence[Tensor]:
        """Return the inputs of what a slot holds, on the first stage."""
        return own[held.microbatch] if held.microbatch >= 0 else self._kept[0][held.microbatch]

    def targets_of(self, held: SlotMicrobatch, own: Batch) -> Sequence[Tensor]:
        """Return the targets of what a slot holds, on the last stage."""
        return own[held.microbatch] if held.microbatch >= 0 else self._kept[1][held.microbatch]

    def keep_results(self, held: SlotMicrobatch, results: tuple[Tensor, ...]) -> None:
        """As of :class:`OpenMicrobatches`."""
        raise NotImplementedError(f"{held}: no replica computes another one's microbatches up to a deadline")

    @torch.no_grad()
    def end_step(self, results: dict[int, tuple[Tensor, ...]]) -> bool:
        """Keep what is deferred, and number the results as slots are, see :class:`OpenMicrobatches`."""
        self.slots.end_step()
        in_order = [results.pop(held.microbatch) for held in self.slots.held] if results else []
        results.update(enumerate(in_order))
        own = self.slots.own
        self.deferral.take(own)
        inputs, targets = (self._copies(batch, own) for batch in self._batch)
        self._kept, self._batch = (inputs, targets), ((), ())
        left = ", ".join(map(str, range(own, self._microbatches)))
        self.told = f"microbatches of replica {self._replica} that come first in the next step: {left}" if left else None
        return True

    def go_on_after(self, before: OpenMicrobatches) -> None:
        """As of :class:`OpenMicrobatches`: what is deferred is computed by the stage as it is now, as all of the next step."""
        if isinstance(before, DeferredMicrobatches) and before.deferral.deadline == self.deferral.deadline:
            self.deferral.go_on_after(before.deferral)
            self._kept = before._kept

    def __str__(self) -> str:
        return str(self.deferral)

    def _copies(self, batch: Batch, own: int) -> dict[int, Sequence[Tensor]]:
        """Return copies of what is deferred, as a user's batch may change, by number in the next step."""
        left = range(own, self._microbatches) if batch else ()
        return {number - self._microbatches: [one.clone() for one in batch[number]] for number in left}
