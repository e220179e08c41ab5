"""The limits of a membership, in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KNOWN_SECONDS: Final = 3.0
"""The time that a rank which fails or leaves stays until the others know it, once it knows the cause itself; seconds."""
LOST_STORE_SECONDS: Final = 0.5
"""The time that a rank that closes waits for each request to a lost store, which may never be answered; seconds."""
CERTAIN_SECONDS: Final = 2.0
"""Seconds without a heartbeat before which no rank is lost, whatever else is known of it."""
_HURRY_INTERVAL: Final = 0.01
"""Seconds between two heartbeats of a rank in a hurry, per eight ranks, because all ranks in a hurry read all records."""
_ASK_BEATS: Final = 2
_FROZEN_SECONDS: Final = 2.75
_STORE_SECONDS: Final = 6.0


@dataclass(frozen=True, slots=True)
class HeartbeatTiming:
    """The limits of a membership.

    Attributes:
        interval: Seconds between two heartbeats.
        lost_after: Seconds without a heartbeat after which a rank is lost to which no direct question gets through. Also the
            time after which the store is lost though its host answers.
        busy_after: Seconds without a heartbeat after which a rank is lost whose process still answers direct questions. No less
            than ``lost_after``.

    Raises:
        ValueError: ``lost_after`` does not leave time for several heartbeats.
    """

    interval: float = 0.5
    lost_after: float = 10.0
    busy_after: float = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.interval <= self.lost_after / 3:
            raise ValueError(f"interval={self.interval}, lost_after={self.lost_after}: expected 0 < interval <= lost_after / 3")

    @property
    def busy_limit(self) -> float:
        """``busy_after``, or ``lost_after`` if that is longer."""
        return max(self.busy_after, self.lost_after)

    @property
    def ask_after(self) -> float:
        """Seconds without a heartbeat after which a rank is asked directly."""
        return _ASK_BEATS * self.interval

    @property
    def certain_after(self) -> float:
        """Seconds without a heartbeat before which no rank is lost, even if it is known to be gone."""
        return min(CERTAIN_SECONDS, self.lost_after)

    @property
    def frozen_after(self) -> float:
        """Seconds without any sign of life after which a rank is lost to which direct questions got through."""
        return min(_FROZEN_SECONDS, self.lost_after)

    @property
    def store_after(self) -> float:
        """Seconds without an answer after which the store is lost if its host can't be asked directly."""
        return min(_STORE_SECONDS, self.lost_after)

    @property
    def own_report_seconds(self) -> float:
        """The time that a rank that is reported lost but sends heartbeats has to report the cause itself, seconds."""
        return self.lost_after / 2

    @property
    def farewell_seconds(self) -> float:
        """The longest time that a rank stays until the others know that it failed or leaves, seconds."""
        return self.own_report_seconds + KNOWN_SECONDS

    def hurry_interval(self, world_size: int) -> float:
        """Return the seconds between two heartbeats of a rank in a hurry."""
        return min(self.interval, _HURRY_INTERVAL * max(1, world_size / 8))
