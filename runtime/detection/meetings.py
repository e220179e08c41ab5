"""Whether all ranks meet between steps, as clipping by the norm of all gradients makes them: each step is behind a barrier.

Without it a rank begins its next step as soon as it has ended the one before, and steps overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from adaptra.runtime.measuring.measurement import StepMeasurement

AGREEING: Final = 2
"""The number of steps in a row that have to say the same before it counts."""


class Meetings:
    """Tracks from step to step whether ranks meet between them. Until steps say so they do not."""

    def __init__(self) -> None:
        self.barrier = False
        self._others = 0

    def observe(self, step: int, measurements: Iterable[StepMeasurement]) -> bool:
        """Take the measurements of a step. Return whether the answer has changed. The first step follows no other."""
        if step == 0:
            return False
        differs = any(measurement.has_met for measurement in measurements) != self.barrier
        self._others = self._others + 1 if differs else 0
        if self._others < AGREEING:
            return False
        self.barrier, self._others = not self.barrier, 0
        return True
