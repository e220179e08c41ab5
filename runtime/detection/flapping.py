"""Flap damping: the recovery of an edge or stage that turned slow again soon after earlier recoveries is not acted on at once.

Its hold-off is two steps after one relapse, and doubles with each further one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from adaptra.runtime.detection.changes import Change, Where

MOST_RELAPSES: Final = 5
"""Cap of the relapse counter, and so of the hold-off: 32 steps."""


@dataclass(slots=True)
class Relapses:
    """Counts how often an edge or stage has turned slow again soon after a recovery.

    Attributes:
        within: A slowdown within this many steps after a recovery is a relapse. After that many healthy steps the count is
            cleared.
        count: The number of relapses.
    """

    within: int
    count: int = 0
    _since_healed: int | None = None

    @property
    def since_healed(self) -> int | None:
        """The number of healthy steps since the last recovery, or None if there can be no relapse."""
        return self._since_healed

    def step(self) -> None:
        """Advance by one step."""
        if self._since_healed is not None:
            self._since_healed += 1
            if self._since_healed > self.within:
                self.count, self._since_healed = 0, None

    def healed(self) -> None:
        """Record that the edge or stage is healthy, or less slow than before."""
        self._since_healed = 0

    def turned_slow(self) -> None:
        """Record that the edge or stage is slow, or slower than before."""
        if self._since_healed is not None:
            self.count, self._since_healed = min(self.count + 1, MOST_RELAPSES), None


class FlapDamping:
    """Tracks which edges and stages flap.

    Args:
        within: A slowdown within this many steps after a recovery counts as flapping.
    """

    def __init__(self, within: int) -> None:
        self._within = within
        self._relapses: dict[Where, Relapses] = {}

    def step(self) -> None:
        """Advance by one step."""
        for relapses in self._relapses.values():
            relapses.step()

    def changed(self, where: Where, is_slower: bool) -> bool:
        """Record a change at an edge or stage.

        Returns:
            True if it is flapping.
        """
        relapses = self._relapses.setdefault(where, Relapses(self._within))
        if is_slower:
            relapses.turned_slow()
        else:
            relapses.healed()
        return relapses.count > 0

    def forget(self, where: Where) -> None:
        """Discard the history of an edge or stage, because another detector follows it now."""
        self._relapses.pop(where, None)

    def hold_off(self, changes: Iterable[Change]) -> int:
        """Return the steps for which these changes are not acted on: the longest hold-off of the edges and stages in them.

        It is 0 unless all of them are recoveries of flapping edges and stages.
        """
        steps = [self._hold_off_of(change.where) for change in changes]
        return max(steps, default=0) if all(steps) else 0

    def _hold_off_of(self, where: Where) -> int:
        relapses = self._relapses.get(where)
        if relapses is None or relapses.count == 0 or relapses.since_healed is None:
            return 0
        return 1 << relapses.count
