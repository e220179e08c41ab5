"""Packet-loss detector of one directed edge, which also finds paths that alternate between two levels from step to step.

Every machine has a single stall now and then. A path counts as lossy under two conditions. Messages stall in several of the
recent steps, and the total stall time averaged over all messages exceeds the change threshold.

A busy host delays messages and ops alike. So steps in which a rank paused for as long are subtracted from those that stalled.
And the first steps that are watched tell of no loss by themselves.

It has recovered after enough stall-free steps. At the previous stall rate, the probability of that many is below :data:`DOUBT`.
Each premature recovery doubles their number.
"""

from __future__ import annotations

import math
from collections import deque
from copy import copy
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from adaptra.runtime.detection.flapping import Relapses
from adaptra.runtime.detection.level_shift import DetectorOptions
from adaptra.runtime.measuring.measurement import EdgeMeasurement, Stalls

DOUBT: Final = 1e-3
"""Accepted probability that a path is still lossy when it is declared recovered."""


FEW_PAUSES: Final = 2
"""The number of steps with a long pause among those of a window that don't tell of a busy host."""


@dataclass(frozen=True, slots=True)
class PacketLoss:
    """The loss of a lossy edge.

    Attributes:
        prompt: The flight of a message that is not late, seconds.
        share: The share of its messages that are late; above 0, at most 1.
        extra: The additional flight of a late message, seconds.
    """

    prompt: float
    share: float
    extra: float

    @property
    def mean(self) -> float:
        """The mean flight of a message, seconds."""
        return self.prompt + self.share * self.extra


@dataclass(slots=True)
class LossyPath:
    """The state of one observed edge.

    Attributes:
        window: The number of recent steps over which stalls are counted.
        relapses: The number of times it turned lossy soon after a recovery.
        loss: Its loss, while it is lossy.
        confidence: The probability that its last change was more than chance.
    """

    window: int
    relapses: Relapses
    loss: PacketLoss | None = None
    _recent: deque[tuple[int, float, Stalls]] = field(init=False)
    _pauses: deque[float] = field(init=False)
    confidence: float = 1.0
    _quiet: int = 0
    _hold_off_steps: int = 0

    def __post_init__(self) -> None:
        self._recent = deque(maxlen=self.window)
        self._pauses = deque(maxlen=self.window)

    def __deepcopy__(self, memo: dict[int, object]) -> LossyPath:
        # The steps' values never change: a suspicion need not copy them one by one.
        copied = copy(self)
        copied.relapses, copied._recent, copied._pauses = copy(self.relapses), self._recent.copy(), self._pauses.copy()
        return copied

    def changes(self, measured: EdgeMeasurement, pause: float, options: DetectorOptions, smallest: float) -> bool:
        """Take the measurement of a step.

        Args:
            measured: The step's measurement of the edge.
            pause: The longest pause of the ranks on both sides, seconds. Stalls up to this length are attributed to it.
            options: The thresholds of a change.
            smallest: The least growth of the mean flight that counts as a change, seconds.

        Returns:
            True if the path has turned lossy or recovered.
        """
        self.relapses.step()
        stalls = measured.stalls
        if stalls.late and stalls.lateness / stalls.late <= pause:
            stalls = Stalls()
        self._recent.append((measured.messages, measured.estimate.flight, stalls))
        self._pauses.append(pause)
        stalled = sum(seen.count > 0 for _, _, seen in self._recent)
        self._quiet = 0 if stalls.count else self._quiet + 1
        if self.loss is not None:
            if stalls.count:
                self._wait_longer(stalled, options.persist)
            return self._quiet >= self._hold_off_steps and self._heal()
        messages = sum(messages for messages, _, _ in self._recent)
        lateness = sum(seen.lateness for _, _, seen in self._recent)
        if not stalls.count or stalled < options.stalls or lateness < smallest * messages:
            return False
        # The first steps of a run stall for many reasons: connections, caches, ranks that still start.
        if len(self._recent) <= options.stalls or stalled - self._paused_for(lateness) < options.stalls:
            return False
        self._turn_lossy(messages, lateness)
        self.confidence = 1.0 - _by_chance(stalled, len(self._recent), 1 / self.window)
        self._wait_longer(stalled, options.persist)
        return True

    def _paused_for(self, lateness: float) -> int:
        """Return in how many recent steps a rank paused for as long as messages stall; 0 for a few, which any rank has."""
        stalls = sum(seen.late for _, _, seen in self._recent)
        found = sum(pause * stalls >= lateness for pause in self._pauses)
        return found if found > FEW_PAUSES else 0

    def _turn_lossy(self, messages: int, lateness: float) -> None:
        late = sum(seen.late for _, _, seen in self._recent)
        prompt = [flight for messages, flight, seen in self._recent if 2 * seen.late <= messages]
        fastest = min(flight for _, flight, _ in self._recent)
        self.loss = PacketLoss(median(prompt) if prompt else fastest, late / messages, lateness / late)
        self.relapses.turned_slow()

    def _wait_longer(self, stalled: int, least: int) -> None:
        """Set the number of stall-free steps that a recovery takes.

        A path with this stall rate shows as many with a probability of at most DOUBT.
        """
        first = next(index for index, (_, _, seen) in enumerate(self._recent) if seen.count)
        rate = stalled / (len(self._recent) - first + 1)
        steps = max(least, math.ceil(math.log(DOUBT) / math.log1p(-rate)))
        self._hold_off_steps = steps << self.relapses.count

    def _heal(self) -> bool:
        self.loss, self.confidence = None, 1.0 - DOUBT
        self.relapses.healed()
        self._recent.clear()
        return True


def _by_chance(times: int, steps: int, rate: float) -> float:
    """Return the probability that at least ``times`` of ``steps`` steps stall, if each does with probability ``rate``."""
    return sum(math.comb(steps, count) * rate**count * (1 - rate) ** (steps - count) for count in range(times, steps + 1))
