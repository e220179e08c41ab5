"""One measured value followed through the steps: when it has really moved."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from statistics import median
from typing import Final

from adaptra.runtime.detection.changes import AGREEMENT

DEVIATIONS: Final = 1.4826
"""Of normally distributed values, a standard deviation in units of the median absolute deviation."""

NINE_IN_TEN: Final = 2.4387
"""Of normally distributed values, what nine in ten are not further off than, in units of the median absolute deviation."""


@dataclass(frozen=True, slots=True)
class DetectorOptions:
    """What counts as a change.

    Attributes:
        warm_up: How many first steps are not looked at.
        calibration: Over how many steps after them the first levels are the medians.
        persist: How many steps in a row must agree on a change.
        lasting: How many seconds these must take together, so that more must agree where steps are short. A busy machine pauses
            for about as long.
        lasting: How many seconds those steps must take together: short steps are more. A busy machine pauses for about as long.
        change: The smallest change, as a part of a stage's F + I + W, and for an edge of the mean forward.
        edge_change: The smallest change of an edge as a part of its own flight; links are less steady than devices.
        noise: The smallest change in units of the recent steps' scatter (median absolute deviation).
        window: Over how many recent steps that scatter is taken.
        memory: Of how many steps it is remembered how far they were off, also from where the level stood before it moved.
        relapse: What turns slow again within so many steps after it healed is flapping; what has not is forgotten.
        stalls: In how many steps of the last ``stall_window`` messages of an edge must stall for it to be lossy.
        stall_window: Over how many recent steps stalls are counted.
    """

    warm_up: int = 1
    calibration: int = 3
    persist: int = 2
    lasting: float = 0.1
    change: float = 0.1
    edge_change: float = 0.2
    noise: float = 6.0
    window: int = 8
    memory: int = 64
    relapse: int = 40
    stalls: int = 3
    stall_window: int = 16


@dataclass(slots=True)
class Level:
    """A followed value.

    Attributes:
        level: Where it stands.
        calibrated: Where it was at first.
        scatter: Of the values that it was calibrated with.
        recent: The recent steps' values there.
        remembered: How far off steps were from those before them at the same level, wherever that stood then.
        suspects: The latest steps' values, if they are elsewhere.
    """

    level: float
    calibrated: float
    scatter: float
    recent: deque[float]
    remembered: deque[float]
    suspects: list[float] = field(default_factory=list[float])

    def __deepcopy__(self, memo: dict[int, object]) -> Level:
        copied = (self.recent.copy(), self.remembered.copy(), self.suspects.copy())
        return Level(self.level, self.calibrated, self.scatter, *copied)

    @staticmethod
    def calibrate(values: Sequence[float], options: DetectorOptions) -> Level:
        """A level at the median of what was measured first."""
        level = median(values)
        remembered = deque((abs(value - level) for value in values), maxlen=options.memory)
        return Level(level, level, _scatter(values), deque(values, maxlen=options.window), remembered)

    @property
    def latest(self) -> float:
        """Where the recent steps are in the middle: surer than the level, which the first few of them told."""
        return median(self.recent)

    @property
    def noise(self) -> float:
        """How far its values scatter; the median absolute deviation of normally distributed ones that scatter as far.

        The latest steps are few, and there are fewest right after the level has moved. So it is never less than what is
        remembered, of which nine in ten are within :data:`NINE_IN_TEN` times the median, unless pauses are usual here.
        """
        remembered = sorted(self.remembered)[int(0.9 * (len(self.remembered) - 1))] / NINE_IN_TEN
        return max(self.scatter, _scatter(self.recent), remembered)

    def limit(self, smallest: float, noise: float) -> float:
        """How far apart two values are that differ by more than noise."""
        return max(smallest, noise * self.noise)

    def moves(self, value: float, options: DetectorOptions, smallest: float) -> bool:
        """Take a step's value; whether the last ones agree that the level has moved."""
        limit = self.limit(smallest, options.noise)
        same_side = not self.suspects or (value > self.level) == (self.suspects[-1] > self.level)
        if abs(value - self.level) <= limit or not same_side:
            # What came to nothing was noise, and widens the scatter from here on.
            noise, middle = [*self.suspects, value], median(self.recent)
            self.remembered.extend(abs(one - middle) for one in noise)
            self.recent.extend(noise[-options.window :])
            self.suspects.clear()
            return False
        self.suspects.append(value)
        last = self.suspects[-options.persist :]
        agree = max(last) - min(last) <= max(limit, AGREEMENT * abs(value - self.level))
        return len(self.suspects) >= (options.persist if agree else max(options.persist, options.window))

    @property
    def confidence(self) -> float:
        """The least probability that the latest steps, if they are elsewhere, are not there by chance.

        However the noise is distributed, it is ``z`` standard deviations off to one side with a probability of at most
        ``1 / (1 + z²)`` (Cantelli's inequality), and in each step for itself.
        """
        deviation = DEVIATIONS * self.noise
        if deviation == 0.0:
            return 1.0
        return 1.0 - prod(1.0 / (1.0 + ((value - self.level) / deviation) ** 2) for value in self.suspects)

    def settle(self, persist: int) -> float:
        """Move the level to where the latest steps are, if they are elsewhere."""
        if self.suspects:
            latest = self.suspects[-persist:]
            self.level = median(latest)
            self.recent.clear()
            self.recent.extend(latest)
            self.suspects.clear()
        return self.level

    def correct(self, level: float) -> None:
        """Put the level where it turns out to be, forgetting what looked like a move."""
        self.level = level
        self.recent.clear()
        self.recent.append(level)
        self.suspects.clear()


def _scatter(values: Sequence[float] | deque[float]) -> float:
    middle = median(values)
    return median(abs(value - middle) for value in values)
