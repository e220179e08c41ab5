"""A clock that stands still while this process is suspended.

A process that was suspended, or too busy to check, can't know whether others were silent meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_LATE: Final = 2
"""A tick later than this many intervals means that the process was suspended; the excess is not counted."""


class AwakeClock:
    """Seconds in which this process ran, as shown by the ticks of one of its threads.

    Args:
        tick: Seconds between two calls of :meth:`tick`.
        clock: The seconds of a clock that never stands still.
    """

    def __init__(self, tick: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = _LATE * tick
        self._clock = clock
        self._last = (0.0, clock())

    def tick(self) -> None:
        """Record that this process runs. Only one thread may call it."""
        self._last = (self.now(), self._clock())

    def now(self) -> float:
        """Return the seconds so far. Any thread may call it."""
        awake, ticked_at = self._last
        return awake + min(self._clock() - ticked_at, self._most)
