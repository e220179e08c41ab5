"""The turns of several workers at the device of their process.

Ops of two workers at once would take longer each, and their measured times would say nothing. Emulated devices would compute
twice at once. So one op runs at a time. Where several wait, an I comes before an F before a W, as others wait for their results
in that order. The wait is no part of an op's time.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import Final

from adaptra.program import Kind, Op

_RANK: Final = {Kind.I: 0, Kind.B: 0, Kind.F: 1, Kind.W: 2}


class DeviceTurns:
    """Whose turn it is. Used by the threads of all workers of a process."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: list[tuple[int, int, int]] = []
        self._arrivals = count()
        self._is_taken = False

    @contextmanager
    def during(self, op: Op) -> Generator[None]:
        """Run an op within this context once the device is free and no op that waits comes before."""
        with self._condition:
            own = _RANK[op.kind], op.microbatch, next(self._arrivals)
            heappush(self._waiting, own)
            while self._is_taken or self._waiting[0] != own:
                self._condition.wait()
            heappop(self._waiting)
            self._is_taken = True
        try:
            yield
        finally:
            with self._condition:
                self._is_taken = False
                self._condition.notify_all()
