"""One directed edge followed through the steps: whether its path is lossy, or flaps between two levels from step to step.

Single stalls are what every machine has now and then. A path is held to be lossy if messages stall in several of the recent
steps, and all together by as much as would count as a change of the edge if each message bore its part. It is held to have
healed once no message has stalled for so many steps as hardly ever pass without a stall on a path that stalls as often as this
one did; longer each time that this has turned out to be too early.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from adaptra.runtime.detection.flapping import Relapses
from adaptra.runtime.detection.level_shift import DetectorOptions
from adaptra.runtime.detection.measurement import EdgeMeasurement, Stalls

DOUBT: Final = 1e-3
"""How likely it may be that a path that still stalls shows no stall for as long as it takes to believe that it has healed."""


@dataclass(frozen=True, slots=True)
class PacketLoss:
    """How a lossy edge behaves.

    Attributes:
        prompt: Flight of a message that is not late; seconds.
        share: Of its messages that are late; above 0, at most 1.
        extra: What a late message takes longer; seconds.
    """

    prompt: float
    share: float
    extra: float

    @property
    def mean(self) -> float:
        """The flight of the mean message."""
        return self.prompt + self.share * self.extra


@dataclass(slots=True)
class LossyPath:
    """A followed edge.

    Attributes:
        window: Of how many recent steps stalls count.
        relapses: How often it has turned lossy soon after it had healed.
        loss: How it behaves, while it is lossy.
        confidence: The probability that it last turned so by more than chance.
    """

    window: int
    relapses: Relapses
    loss: PacketLoss | None = None
    _recent: deque[tuple[int, float, Stalls]] = field(init=False)
    confidence: float = 1.0
    _quiet: int = 0
    _patience: int = 0

    def __post_init__(self) -> None:
        self._recent = deque(maxlen=self.window)

    def changes(self, measured: EdgeMeasurement, pause: float, options: DetectorOptions, smallest: float) -> bool:
        """Take a step; whether it has turned the path lossy or healed.

        Args:
            measured: What the step showed of the edge.
            pause: The longest pause of the ranks on both sides, seconds: stalls no longer than that are laid to it.
            options: What counts as a change.
            smallest: How much longer the mean message must take to count as one, seconds.
        """
        self.relapses.step()
        stalls = measured.stalls
        if stalls.late and stalls.lateness / stalls.late <= pause:
            stalls = Stalls()
        self._recent.append((measured.messages, measured.estimate.flight, stalls))
        stalled = sum(seen.count > 0 for _, _, seen in self._recent)
        self._quiet = 0 if stalls.count else self._quiet + 1
        if self.loss is not None:
            if stalls.count:
                self._wait_longer(stalled, options.persist)
            return self._quiet >= self._patience and self._heal()
        messages = sum(messages for messages, _, _ in self._recent)
        lateness = sum(seen.lateness for _, _, seen in self._recent)
        if not stalls.count or stalled < options.stalls or lateness < smallest * messages:
            return False
        self._turn_lossy(messages, lateness)
        self.confidence = 1.0 - _by_chance(stalled, len(self._recent), 1 / self.window)
        self._wait_longer(stalled, options.persist)
        return True

    def _turn_lossy(self, messages: int, lateness: float) -> None:
        late = sum(seen.late for _, _, seen in self._recent)
        prompt = [flight for messages, flight, seen in self._recent if 2 * seen.late <= messages]
        fastest = min(flight for _, flight, _ in self._recent)
        self.loss = PacketLoss(median(prompt) if prompt else fastest, late / messages, lateness / late)
        self.relapses.turned_slow()

    def _wait_longer(self, stalled: int, least: int) -> None:
        """How many steps without a stall it takes to believe in healing: hardly any path that stalls so often shows as many."""
        first = next(index for index, (_, _, seen) in enumerate(self._recent) if seen.count)
        rate = stalled / (len(self._recent) - first + 1)
        steps = max(least, math.ceil(math.log(DOUBT) / math.log1p(-rate)))
        self._patience = steps << self.relapses.count

    def _heal(self) -> bool:
        self.loss, self.confidence = None, 1.0 - DOUBT
        self.relapses.healed()
        self._recent.clear()
        return True


def _by_chance(times: int, steps: int, rate: float) -> float:
    """How likely at least so many of some steps show a stall, if one in ``1 / rate`` does."""
    return sum(math.comb(steps, count) * rate**count * (1 - rate) ** (steps - count) for count in range(times, steps + 1))
