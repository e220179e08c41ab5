"""Silence of other ranks: who has sent no heartbeat for how long, as far as this rank's own questions could have shown it.

Silence lasts from the answer that first showed a heartbeat to the last question that showed no newer one. So neither this
rank's delay to the store nor a slow store makes another rank look silent. All times are the caller's, in seconds of one clock
that stands still while this process does.

A silent rank may be busy: its process lives, and its Python does not run. :class:`.direct_questions.Sign` tells that from a
process that is frozen, cut off or gone.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final

from adaptra.runtime.membership.direct_questions import UNKNOWN, Sign
from adaptra.runtime.membership.timing import HeartbeatTiming

_QUIET_SECONDS: Final = 1.5
"""Seconds without a heartbeat after which a rank that was reported lost is lost."""
_ANSWERS: Final = 16
"""The number of the store's last answers from which its response time is taken."""
_UNANSWERED: Final = 3
"""Direct questions without an answer after which a rank is frozen or cut off. One alone may be lost on its way."""


class Loss(Enum):
    """Why a silent rank is lost."""

    SILENT = ""
    FROZEN = ": its process does not answer, so it is frozen or cut off"
    GONE = ": its process has ended"
    BUSY = ": its process answers, but its Python does not run"


class FailureDetector:
    """The heartbeats that this rank has read of others, and the store's response times.

    Args:
        timing: The limits.
        now: The time at which this rank begins to watch.
    """

    def __init__(self, timing: HeartbeatTiming, now: float) -> None:
        self._timing = timing
        self._quiet_after = max(3 * timing.interval, min(_QUIET_SECONDS, timing.lost_after))
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

    def is_quiet(self, rank: int, sign: Sign = UNKNOWN) -> bool:
        """Return True if a rank that was reported lost has been silent long enough to confirm it, and does not answer."""
        answers = sign.is_reachable and self._asked_at - sign.answered_at <= self._quiet_after and not sign.is_gone
        return self.silence(rank) > self._quiet_after and not answers

    def loss(self, rank: int, sign: Sign = UNKNOWN) -> Loss | None:
        """Return why a rank is lost, or None if it is not.

        Args:
            rank: The rank.
            sign: What direct questions say of it.
        """
        silence, slack = self.silence(rank), max(self._response_times)
        if not sign.is_reachable:
            return Loss.SILENT if silence > self._timing.lost_after + slack else None
        if silence <= self._timing.certain_after:
            return None
        if sign.is_gone:
            return Loss.GONE
        quiet = min(silence, self._asked_at - sign.answered_at)
        if sign.unanswered >= _UNANSWERED and quiet > self._timing.frozen_after + slack:
            return Loss.FROZEN
        if quiet > self._timing.lost_after + slack:
            return Loss.SILENT
        return Loss.BUSY if silence > self._timing.busy_limit + slack else None

    def is_overdue(self, now: float) -> bool:
        """Return True if a rank of which no record has been found by now would be lost."""
        return now - self._began > self._timing.lost_after


def is_store_lost(silence: float, quiet: float, sign: Sign, timing: HeartbeatTiming) -> bool:
    """Return True if the control store is lost.

    Args:
        silence: Seconds without an answer of the store.
        quiet: Seconds without an answer of the store and without one to a direct question to its host.
        sign: What direct questions say of its host.
        timing: The limits.
    """
    if not sign.is_reachable:
        return silence > timing.store_after
    if sign.is_gone and silence > timing.certain_after:
        return True
    if sign.unanswered >= _UNANSWERED and quiet > timing.frozen_after:
        return True
    return silence > (timing.busy_limit if sign.is_held else timing.lost_after)
