"""Silence of other ranks: who has sent no heartbeat for how long, as far as this rank's own questions could have shown it.

Silence lasts from the answer that first showed a heartbeat to the last question that showed no newer one. So neither this
rank's delay to the store nor a slow store makes another rank look silent. All times are the caller's, in seconds of one clock
that stands still while this process does.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_QUIET_SECONDS: Final = 1.5
"""Seconds without a heartbeat after which a rank that was reported lost is lost."""
_ANSWERS: Final = 16
"""The number of the store's last answers from which its response time is taken."""


class FailureDetector:
    """The heartbeats that this rank has read of others, and the store's response times.

    Args:
        interval: Seconds between two heartbeats of a rank.
        lost_after: Seconds without a heartbeat after which a rank is lost.
        now: The time at which this rank begins to watch.
    """

    def __init__(self, interval: float, lost_after: float, now: float) -> None:
        self._lost_after = lost_after
        self._quiet_after = max(3 * interval, min(_QUIET_SECONDS, lost_after))
        self._began = now
        self._asked_at = now
        self._heard_at: dict[int, float] = {}
        # The longest of these response times is added to a rank's timeout.
        self._response_times = deque([0.0], maxlen=_ANSWERS)

    def answered(self, asked_at: float, now: float) -> None:
        """Record an answer of the store that arrives now, and the time of its question."""
        self._asked_at = asked_at
        self._response_times.append(now - asked_at)

    def heard(self, rank: int, now: float) -> None:
        """Record that the answer that arrives now shows a newer heartbeat of a rank."""
        self._heard_at[rank] = now

    def silence(self, rank: int) -> float:
        """Return the seconds without a heartbeat of a rank, up to the last question that was answered."""
        return self._asked_at - self._heard_at.get(rank, self._began)

    def is_quiet(self, rank: int) -> bool:
        """Return True if a rank that was reported lost has been silent long enough to confirm it."""
        return self.silence(rank) > self._quiet_after

    def is_lost(self, rank: int) -> bool:
        """Return True if a rank has been silent for so long that it is lost."""
        return self.silence(rank) > self._lost_after + max(self._response_times)

    def is_overdue(self, now: float) -> bool:
        """Return True if a rank of which no record has been found by now would be lost."""
        return now - self._began > self._lost_after
