"""Change-point (level-shift) detection for one measured value."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from statistics import median
from typing import Final

from adaptra.runtime.detection.changes import AGREEMENT

DEVIATIONS: Final = 1.4826
"""The standard deviation of a normal distribution, in units of its median absolute deviation."""

NINE_IN_TEN: Final = 2.4387
"""The 90th percentile of the absolute deviation of a normal distribution, in units of its median absolute deviation."""


FALLEN: Final = 5.0
"""The difference between a level and the median of the recent steps that noise alone does not explain, in units of their
median absolute deviation. The median of eight normal values has a standard error of 0.65 such units. Those of a busy machine
are skewed, and there a smaller difference finds twice as many changes.
"""


@dataclass(frozen=True, slots=True)
class DetectorOptions:
    """Thresholds and windows of the detector.

    Attributes:
        warm_up: The number of first steps that are ignored.
        calibration: The number of steps after them whose medians are the first levels. If they scatter, as on a busy host, the
            calibration is repeated.
        calibrations: The number of calibrations at most.
        persist: The number of steps in a row that must agree on a change.
        lasting: The least total time of these steps, seconds. With short steps more of them must agree, as a busy machine
            pauses for about this long.
        change: The smallest change, as a fraction of a stage's F + I + W, and for an edge of the mean forward.
        edge_change: The smallest change of an edge, as a fraction of its own flight. Links are less steady than devices.
        noise: The smallest change, in units of the recent steps' scatter (median absolute deviation).
        window: The number of recent steps over which that scatter is taken.
        memory: The number of steps whose deviations are remembered, including deviations from earlier levels.
        relapse: The steps after a recovery within which a new slowdown counts as flapping. After that the history is cleared.
        stalls: The number of the last ``stall_window`` steps in which messages must stall for an edge to be lossy.
        stall_window: The number of recent steps over which stalls are counted.
    """

    warm_up: int = 1
    calibration: int = 3
    calibrations: int = 4
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
    """The level of one measured value.

    Attributes:
        level: The current level.
        calibrated: The level at calibration.
        scatter: The median absolute deviation of the calibration values.
        recent: The recent steps' values at the current level.
        remembered: Deviations of past steps from the level of their time.
        suspects: The latest steps' values that deviate from the level and may be the start of a shift.
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
        """Return a level at the median of the first measured values."""
        level = median(values)
        remembered = deque((abs(value - level) for value in values), maxlen=options.memory)
        return Level(level, level, median_deviation(values), deque(values, maxlen=options.window), remembered)

    @property
    def latest(self) -> float:
        """The median of the recent steps, more exact than the level, which was set from only a few of them."""
        return median(self.recent)

    @property
    def noise(self) -> float:
        """The scatter of the value, as the median absolute deviation of a normal distribution that scatters as far.

        The recent steps are few, and fewest right after the level has moved. So the noise is at least the 90th percentile of
        the remembered deviations divided by :data:`NINE_IN_TEN`. For normal values that is the median; pauses raise it only if
        more than one step in ten has one.
        """
        remembered = sorted(self.remembered)[int(0.9 * (len(self.remembered) - 1))] / NINE_IN_TEN
        return max(self.scatter, median_deviation(self.recent), remembered)

    def limit(self, smallest: float, noise: float) -> float:
        """Return the largest difference between two values that noise alone explains."""
        return max(smallest, noise * self.noise)

    def moves(self, value: float, options: DetectorOptions, smallest: float) -> bool:
        """Take the value of a step.

        Returns:
            True if the last steps agree that the level has moved.
        """
        limit = self.limit(smallest, options.noise)
        same_side = not self.suspects or (value > self.level) == (self.suspects[-1] > self.level)
        if abs(value - self.level) <= limit or not same_side:
            # These suspects turned out to be noise: they widen the scatter from now on.
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
        """A lower bound of the probability that the suspects are a shift and not noise.

        Cantelli's inequality: in each step, the probability of a deviation by ``z`` standard deviations to one side is at most
        ``1 / (1 + z²)``. Steps are taken as independent.
        """
        deviation = DEVIATIONS * self.noise
        if deviation == 0.0:
            return 1.0
        return 1.0 - prod(1.0 / (1.0 + ((value - self.level) / deviation) ** 2) for value in self.suspects)

    def has_fallen(self, smallest: float, window: int) -> bool:
        """Return True if the recent steps agree on a lower level, though each alone may be noise; :meth:`settle` then moves it.

        A level that was set while steps scattered would stay otherwise: what they scattered then is remembered for long. Only
        recoveries are found so, since a host that is busy for a while may slow as many steps.

        Args:
            smallest: The smallest change.
            window: The number of steps that must agree.
        """
        if self.suspects or len(self.recent) < window or self.level - self.latest <= smallest:
            return False
        if self.level - self.latest <= FALLEN * median_deviation(self.recent):
            return False
        self.suspects.extend(self.recent)
        return True

    def settle(self, persist: int) -> float:
        """Move the level to the median of the last ``persist`` suspects, if there are any, and return the level."""
        if self.suspects:
            latest = self.suspects[-persist:]
            self.level = median(latest)
            self.recent.clear()
            self.recent.extend(latest)
            self.suspects.clear()
        return self.level

    def correct(self, level: float) -> None:
        """Set the level to a value that is known otherwise, and discard the suspects."""
        self.level = level
        self.recent.clear()
        self.recent.append(level)
        self.suspects.clear()


def median_deviation(values: Sequence[float] | deque[float]) -> float:
    """Return the median absolute deviation from the median."""
    middle = median(values)
    return median(abs(value - middle) for value in values)
