"""How far the times of steps scatter, and for how many steps a gain must last until it exceeds that."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import median
from typing import Final

DIFFERENCES: Final = 1.0483
"""Of normally distributed values, a standard deviation in units of the median difference between one and the next."""

STANDARD_ERRORS: Final = 3.0
"""A gain is sure once it is so many standard errors of the mean step's time."""

SHOWN: Final = 2
"""Steps that a detection is made of."""


MOST_STEPS: Final = 1 << 30
"""For ever: what gains nothing."""


class StepNoise:
    """Follows the times of steps. Whatever turns slow or heals shows in one difference only, and so is no noise.

    Args:
        memory: Over how many recent steps.
    """

    def __init__(self, memory: int) -> None:
        self._seconds: deque[float] = deque(maxlen=memory)

    def observe(self, seconds: float) -> None:
        """Take a step's time."""
        self._seconds.append(seconds)

    def last(self, seconds: float) -> int:
        """How many of the latest steps it takes to make up so many seconds; all of them if they are too few."""
        total = 0.0
        for count, taken in enumerate(reversed(self._seconds), start=1):
            total += taken
            if total >= seconds:
                return count
        return len(self._seconds)

    @property
    def deviation(self) -> float:
        """The standard deviation of a step's time, in seconds; 0 before there are two steps."""
        differences = [abs(later - earlier) for earlier, later in pairwise(self._seconds)]
        return DIFFERENCES * median(differences) if differences else 0.0


def steps_until_sure(gain: float, deviation: float) -> int:
    """For how many steps after its detection a change must last until what it gains is beyond noise.

    The mean of n steps has a standard error of ``deviation / sqrt(n)``.

    Args:
        gain: Seconds per step.
        deviation: Standard deviation of a step's time, in seconds.
    """
    if deviation == 0.0:
        return 0
    steps = (STANDARD_ERRORS * deviation / gain) ** 2 - SHOWN if gain > 0.0 else math.inf
    return math.ceil(min(max(steps, 0.0), MOST_STEPS))
