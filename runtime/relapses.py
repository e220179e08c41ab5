"""What flaps: a place that turns slow again soon after it had healed, and how long its next healing is doubted for that.

A healing that is doubted is measured, but not planned for: the plan for the slow place stays until the place has been healthy
for long enough. Should it turn slow again meanwhile, that plan still runs; should it turn slow in another way, that is a change
from what was measured, not from what was planned for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from adaptra.runtime.changes import EdgeChange, StageChange
from adaptra.runtime.level import DetectorOptions

MOST_RELAPSES: Final = 5
"""More relapses than these don't delay a healing any further."""

C = TypeVar("C", StageChange, EdgeChange)


@dataclass(slots=True)
class Relapses:
    """Counts how often a place has turned slow again soon after its healing was planned for.

    Attributes:
        count: So often, until it has been healthy for long enough for that to be forgotten.
    """

    count: int = 0
    _since_healed: int | None = None

    @property
    def factor(self) -> int:
        """How many times as long a healing must last to be planned for."""
        return 1 << self.count

    def step(self, options: DetectorOptions) -> None:
        """A step has passed."""
        if self._since_healed is not None:
            self._since_healed += 1
            if self._since_healed > options.relapse:
                self.count, self._since_healed = 0, None

    def healed(self) -> None:
        """The place is planned for as healthy, or as less slow."""
        self._since_healed = 0

    def turned_slow(self) -> None:
        """The place is slow, or slower than it was."""
        if self._since_healed is not None:
            self.count, self._since_healed = min(self.count + 1, MOST_RELAPSES), None


class Doubt(Generic[C]):
    """Which changes of one place are to be planned for, and when."""

    def __init__(self, options: DetectorOptions) -> None:
        self._options = options
        self._relapses = Relapses()
        self._doubted: C | None = None
        self._lasted = 0

    @property
    def is_open(self) -> bool:
        """Whether a healing has been measured and is not planned for yet."""
        return self._doubted is not None

    def step(self, change: C | None, is_steady: bool) -> C | None:
        """Take a step; what is to be planned for from now on, if that is anything else than before.

        Args:
            change: What has changed, as far as that is sure.
            is_steady: Whether the step looked like those before it. Others don't count as healthy.
        """
        self._relapses.step(self._options)
        if change is not None and change.is_slower:
            doubted, self._doubted = self._doubted, None
            if doubted is not None and change.undoes(doubted):
                return None
            if doubted is None:
                self._relapses.turned_slow()
            return self._told(change)
        if change is not None:
            self._doubted = change if self._doubted is None else change.after(self._doubted)
            self._lasted = self._options.persist
        elif is_steady:
            self._lasted += 1
        if self._doubted is None or self._lasted < self._options.persist * self._relapses.factor:
            return None
        change, self._doubted = self._doubted, None
        self._relapses.healed()
        return self._told(change)

    def end(self) -> None:
        """Plan for what is measured from now on."""
        self._doubted = None

    def _told(self, change: C) -> C:
        return replace(change, is_flapping=self._relapses.count > 0)
