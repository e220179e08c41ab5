"""What the log says of strangers whom the delegate turned away: one line for each address, however often it tried."""

from __future__ import annotations

import logging
import threading
from typing import Final

from adaptra import _C

logger = logging.getLogger(__name__)

_QUIET_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 10.0


class RejectedConnections:
    """Logs each address once, with how often it was turned away: when it has been quiet for a second, or goes on for ten.

    Args:
        engine: Counts them.
        rank: For the log.
    """

    def __init__(self, engine: _C.Engine, rank: int) -> None:
        self._engine = engine
        self._rank = rank
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        # By address: the count, since when it is that, and when it was first seen; seconds.
        self._seen: dict[str, tuple[int, float, float]] = {}

    def look(self, now: float) -> None:
        """Log who has come and gone, at ``now`` seconds of a clock. Called now and then, by any thread."""
        for address, reason, count in self._engine.refusals():
            with self._lock:
                before, since, first = self._seen.get(address, (0, now, now))
                since = since if count == before else now
                self._seen[address] = (count, since, first)
                if now - since >= _QUIET_SECONDS or now - first >= _PATIENCE_SECONDS:
                    self._log(address, reason, count)

    def close(self) -> None:
        """Log those of whom nothing was said yet."""
        for address, reason, count in self._engine.refusals():
            with self._lock:
                self._log(address, reason, count)

    def _log(self, address: str, reason: str, count: int) -> None:
        if address in self._logged:
            return
        self._logged.add(address)
        times = "once" if count == 1 else f"{count} times"
        logger.warning("rank %d: turned away %s, %s: %s", self._rank, address, times, reason)
