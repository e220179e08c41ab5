"""A clock that stands still while this process is suspended.

A process that was suspended, or too busy to check, can't know whether others were silent meanwhile.
"""

from __future__ import annotations

import time
from typing import Final

_LATE: Final = 2
"""A tick later than this many intervals means that the process was suspended; the excess is not counted."""


class AwakeClock:
    """Seconds in which this process ran, as shown by the ticks of one of its threads.

    Args:
        tick: Seconds between two calls of :meth:`tick`.
    """

    def __init__(self, tick: float) -> None:
        self._most = _LATE * tick
        self._last = (0.0, time.monotonic())

    def tick(self) -> None:
        """Record that this process runs. Only one thread may call it."""
        self._last = (self.now(), time.monotonic())

    def now(self) -> float:
        """Return the seconds so far. Any thread may call it."""
        awake, ticked_at = self._last
        return awake + min(time.monotonic() - ticked_at, self._most)
