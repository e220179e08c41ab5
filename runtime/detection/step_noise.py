"""The noise of step times, and the number of steps after which a gain exceeds it."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import median
from typing import Final

DIFFERENCES: Final = 1.0483
"""The standard deviation of a normal distribution, in units of the median difference between consecutive values."""

STANDARD_ERRORS: Final = 3.0
"""A gain is certain once it exceeds the standard error of the mean step time by this factor."""

SHOWN: Final = 2
"""The number of steps in which a change is detected."""


MOST_STEPS: Final = 1 << 30
"""Stands for infinitely many steps, when nothing is gained."""


class StepNoise:
    """Tracks step times. A slowdown or a recovery shows in one difference only, and so does not count as noise.

    Args:
        memory: The number of recent steps.
    """

    def __init__(self, memory: int) -> None:
        self._seconds: deque[float] = deque(maxlen=memory)

    def observe(self, seconds: float) -> None:
        """Take the time of a step, seconds."""
        self._seconds.append(seconds)

    def last(self, seconds: float) -> int:
        """Return the number of latest steps that together take this many seconds; all of them if they are too few."""
        total = 0.0
        for count, taken in enumerate(reversed(self._seconds), start=1):
            total += taken
            if total >= seconds:
                return count
        return len(self._seconds)

    @property
    def deviation(self) -> float:
        """The standard deviation of a step's time, seconds; 0 before there are two steps."""
        return self.deviation_of(len(self._seconds))

    def deviation_of(self, steps: int) -> float:
        """Return the same of the latest steps, this many of them."""
        latest = list(self._seconds)[max(len(self._seconds) - steps, 0) :]
        differences = [abs(later - earlier) for earlier, later in pairwise(latest)]
        return DIFFERENCES * median(differences) if differences else 0.0


def steps_until_sure(gain: float, deviation: float) -> int:
    """Return the number of steps after its detection for which a change must last until its gain exceeds the noise.

    The mean of n steps has a standard error of ``deviation / sqrt(n)``.

    Args:
        gain: Seconds per step.
        deviation: Standard deviation of a step's time, seconds.
    """
    if deviation == 0.0:
        return 0
    steps = (STANDARD_ERRORS * deviation / gain) ** 2 - SHOWN if gain > 0.0 else math.inf
    return math.ceil(min(max(steps, 0.0), MOST_STEPS))
