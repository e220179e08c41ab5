"""A clock that stands still while this process does.

Whoever was stopped, or too busy to look, can't tell that others were silent meanwhile.
"""

from __future__ import annotations

import time
from typing import Final

_LATE: Final = 2
"""A tick that comes so many times later than due was not only late: the rest of that time this process didn't run."""


class AwakeClock:
    """Seconds in which this process ran, as far as a thread of it that ticks has shown.

    Args:
        tick: Seconds between two calls of :meth:`tick`.
    """

    def __init__(self, tick: float) -> None:
        self._most = _LATE * tick
        self._last = (0.0, time.monotonic())

    def tick(self) -> None:
        """Say that this process runs; by one thread only."""
        self._last = (self.now(), time.monotonic())

    def now(self) -> float:
        """Seconds; by any thread."""
        awake, ticked_at = self._last
        return awake + min(time.monotonic() - ticked_at, self._most)
