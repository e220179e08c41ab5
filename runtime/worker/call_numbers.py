"""The numbers of one rank's calls, which are the same on all ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallNumbers:
    """Counts one rank's calls.

    Attributes:
        next_step: The number of the next step.
        steps_before: The number of training steps before this worker's first one, which random numbers add to the step.
        evaluations: The number of evaluations so far.
        timelines: The number of timelines that were gathered.
        collectives: The number of the user's own collectives over all ranks when the last step ended; None before that.
        compared: How often a batch of each call was offered to the comparison with those of other ranks.
        first_step: The number of this worker's first step.
        updates_before: The number of updates of the parameters in the training before this worker's first one. In x-order it
            is that before its updates have begun anew.
    """

    next_step: int
    steps_before: int = 0
    evaluations: int = 0
    timelines: int = 0
    collectives: int | None = None
    compared: Counter[str] = field(default_factory=Counter[str])
    first_step: int = field(init=False)
    updates_before: int = field(init=False)

    def __post_init__(self) -> None:
        self.first_step = self.updates_before = self.next_step

    @property
    def training_step(self) -> int:
        """The number of the next step in the whole training, including the steps of earlier pipelines."""
        return self.steps_before + self.next_step

    def go_on_at(self, step: int) -> None:
        """Set :attr:`training_step`, on which random numbers depend."""
        self.steps_before = step - self.next_step
