"""Log entries about connections that the delegate rejected: one line for each address, however often it tried."""

from __future__ import annotations

import logging
import threading
from typing import Final

from adaptra import _C

logger = logging.getLogger(__name__)

_QUIET_SECONDS: Final = 1.0
_LONGEST_SECONDS: Final = 10.0


class RejectedConnections:
    """Logs each rejected address once, with the number of attempts: after a second without one, or ten seconds after the first.

    Args:
        engine: Counts them.
        rank: For the log.
    """

    def __init__(self, engine: _C.Engine, rank: int) -> None:
        self._engine = engine
        self._rank = rank
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        # By address: the count, the time of its last change, and the time of the first attempt; seconds.
        self._seen: dict[str, tuple[int, float, float]] = {}

    def look(self, now: float) -> None:
        """Log the addresses that are due at ``now`` seconds of a clock. Called from time to time, by any thread."""
        for address, reason, count in self._engine.refusals():
            with self._lock:
                before, since, first = self._seen.get(address, (0, now, now))
                since = since if count == before else now
                self._seen[address] = (count, since, first)
                if now - since >= _QUIET_SECONDS or now - first >= _LONGEST_SECONDS:
                    self._log(address, reason, count)

    def close(self) -> None:
        """Log the addresses that were not logged yet."""
        for address, reason, count in self._engine.refusals():
            with self._lock:
                self._log(address, reason, count)

    def _log(self, address: str, reason: str, count: int) -> None:
        if address in self._logged:
            return
        self._logged.add(address)
        times = "once" if count == 1 else f"{count} times"
        logger.warning("rank %d: turned away %s, %s: %s", self._rank, address, times, reason)
