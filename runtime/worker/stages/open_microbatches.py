"""What a rank computes in a step of which it is decided as the step runs: see :mod:`adaptra.program.open_tail`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from adaptra.errors import BatchError
from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.synchrony.slots import SlotMicrobatch, Slots
from adaptra.runtime.worker.stages.stage import TrainingStage
from adaptra.simulation.worker_steps import Moved

Batch = Sequence[Sequence[Tensor]]


class OpenMicrobatches(ABC):
    """One rank's part. Used by the thread that runs the steps.

    Args:
        replica: This replica.
        slots: What the slots of its pipeline hold.

    Attributes:
        slots: As given.
        told: A text for people about the last step; None if there is nothing to say.
    """

    event: EventKind
    """The kind of :attr:`told`."""

    def __init__(self, replica: int, slots: Slots) -> None:
        self._replica = replica
        self.slots: Final = slots
        self.told: str | None = None

    @property
    def first(self) -> int:
        """The number of the next step's first microbatch of this replica."""
        return 0

    def is_own(self, held: SlotMicrobatch) -> bool:
        """Return whether a microbatch is of this replica."""
        return held.replica == self._replica

    @abstractmethod
    def begin_step(
        self, step: int, inputs: Batch, targets: Batch, loss_scale: float, steps_before: int, *, is_open: bool
    ) -> None:
        """Begin a step.

        Args:
            step: The step's number.
            inputs, targets: Per microbatch of this replica, on the rank that uses them.
            loss_scale, steps_before: As of :meth:`adaptra.runtime.worker.stages.stage.TrainingStage.begin_step`.
            is_open: Whether anything is to be decided. If not, this replica computes its own microbatches, and no others.
        """
        ...

    @abstractmethod
    def stage_of(self, held: SlotMicrobatch) -> TrainingStage:
        """Return the stage that computes what a slot holds."""
        ...

    @abstractmethod
    def inputs_of(self, held: SlotMicrobatch, own: Batch) -> Sequence[Tensor]:
        """Return the inputs of what a slot holds, on the first stage."""
        ...

    @abstractmethod
    def targets_of(self, held: SlotMicrobatch, own: Batch) -> Sequence[Tensor]:
        """Return the targets of what a slot holds, on the last stage."""
        ...

    @abstractmethod
    def keep_results(self, held: SlotMicrobatch, results: tuple[Tensor, ...]) -> None:
        """Keep what the last stage has returned for another replica's microbatch."""
        ...

    @abstractmethod
    def end_step(self, results: dict[int, tuple[Tensor, ...]]) -> bool:
        """End a step's program.

        Args:
            results: Those of this replica's microbatches by number, on the rank of the last stage. They are completed.

        Returns:
            Whether they are complete only now.

        Raises:
            TransportError: Something could not be exchanged.
        """
        ...

    def go_on_after(self, before: OpenMicrobatches) -> None:  # noqa: B027 - stealing begins anew with each step
        """Go on from what the worker before has left to the next step, where it had the same mode."""

    def require_all(self, microbatches: int) -> None:
        """Refuse to give a step's outputs where this replica's ranks have not computed all of its microbatches.

        Raises:
            BatchError: They have not, or need not have, as the first stage's rank decided otherwise.
        """
        if not self.slots.asks:
            raise BatchError(
                "outputs: this rank asks for them in this step, the rank of the first stage does not: expected that all ranks "
                "of a pipeline ask for outputs in the same steps, where it is decided within a step who computes what"
            )
        if self.slots.own < microbatches:
            raise BatchError(
                f"outputs: {self.slots.own} of {microbatches} microbatches were computed here in this step: expected that all "
                "ranks of a pipeline ask for outputs in the same steps, and in those of the run whose log is replayed"
            )

    def receive_counts(self) -> Counter[tuple[int, MessageSpec]]:
        """Return the number of receive buffers needed at a time, per source worker and message, but for :attr:`slots`."""
        return Counter()

    @property
    def moved(self) -> Moved | None:
        """How many microbatches have changed hands in the last step; None where none can."""
        return None

    def close(self) -> None:
        """End what serves this rank alone."""
        self.slots.close()
