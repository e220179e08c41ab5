"""Changes that the detector finds: a stage or a directed edge that has turned slow or faster or has recovered, and in which
way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from adaptra.unlike_numbers import milliseconds_apart

SHOWN_OCCUPANCY: Final = 50e-6
"""Seconds; a smaller occupancy is not shown in texts."""

SURE: Final = 0.99
"""Confidences from here on are not shown in texts."""

Where = tuple[int, ...]
"""A stage, or the two stages of a directed edge; in a job of several replicas, the replica comes first."""

AGREEMENT: Final = 0.2
"""Two values agree about a change if they differ by at most this fraction of it."""


class ChangeKind(Enum):
    """The property of a stage or an edge that has changed."""

    COMPUTE = "compute"
    """The duration of ops."""
    LATENCY = "latency"
    """The latency of a message that does not queue."""
    BANDWIDTH = "bandwidth"
    """The occupancy: the time for which a message delays the next one."""
    FLIGHT = "flight"
    """Latency or bandwidth: no message followed another closely enough to tell them apart."""
    LOSS = "loss"
    """Packet loss: some messages are delayed, for example sent again, while others are as fast as before."""


@dataclass(frozen=True, slots=True)
class StageChange:
    """A stage whose ops take longer or shorter: seconds of F + I + W before, now, and at calibration.

    ``confidence`` of every change is a lower bound of the probability that it is not noise. ``replica`` is None where one
    pipeline is watched on its own.
    """

    stage: int
    was: float
    now: float
    calibrated: float
    is_healed: bool
    is_flapping: bool = False
    confidence: float = 1.0
    replica: int | None = None

    @property
    def where(self) -> Where:
        """The stage."""
        return _in_replica(self.replica, self.stage)

    @property
    def kind(self) -> ChangeKind:
        """The property that has changed."""
        return ChangeKind.COMPUTE

    @property
    def is_slower(self) -> bool:
        """True if it takes longer than before."""
        return self.now > self.was

    def __str__(self) -> str:
        now, before = (f"{seconds / max(self.calibrated, 1e-9):.2f}x" for seconds in (self.now, self.was))
        what = f"stage {self.stage}" if self.replica is None else f"worker {self.replica}.{self.stage}"
        # "slow: 1.00x" would contradict itself: it is slow beside what it was.
        is_plain = self.is_healed or (self.now > self.calibrated) == self.is_slower
        return f"{what} {_word(self)}: {now} the calibrated time{'' if is_plain else f' (was {before})'}{_doubt(self)}"


@dataclass(frozen=True, slots=True)
class _ChangeOnEdge:
    """A change of a directed edge between stages."""

    source: int
    destination: int
    replica: int | None = field(default=None, kw_only=True)

    @property
    def where(self) -> Where:
        """The edge."""
        return _in_replica(self.replica, self.source, self.destination)

    @property
    def _edge(self) -> str:
        edge = f"edge {self.source}→{self.destination}"
        return edge if self.replica is None else f"{edge} of replica {self.replica}"


@dataclass(frozen=True, slots=True)
class EdgeChange(_ChangeOnEdge):
    """A directed edge between stages whose messages take longer or shorter; seconds.

    ``was``, ``now`` and ``calibrated`` are flights of a message that does not queue. ``occupancy`` is the part of ``now`` for
    which it delays the next message, as far as is known, and ``occupancy_was`` that part of ``was``. ``occupancy_most`` is an
    upper bound of ``occupancy``.
    """

    was: float
    now: float
    calibrated: float
    occupancy_was: float
    occupancy: float
    occupancy_most: float
    is_healed: bool
    is_flapping: bool = False
    confidence: float = 1.0

    @property
    def kind(self) -> ChangeKind:
        """The property that makes up most of the change."""
        most = 0.5 * abs(self.now - self.was)
        if abs(self.occupancy - self.occupancy_was) > most:
            return ChangeKind.BANDWIDTH
        return ChangeKind.LATENCY if self.occupancy_most - self.occupancy_was <= most else ChangeKind.FLIGHT

    @property
    def is_slower(self) -> bool:
        """True if messages take longer than before. A queued message waits for one occupancy per message ahead of it."""
        return self.now + self.occupancy > self.was + self.occupancy_was

    def __str__(self) -> str:
        now, was = milliseconds_apart(self.now, self.was)
        flight = f"{now} (was {was})" if now != was else f"{now} as before"
        queueing = f", {_milliseconds(self.occupancy)} of it occupancy" if self.occupancy >= SHOWN_OCCUPANCY else ""
        if not self.is_healed and self.is_slower != (self.now > self.was):  # the occupancy is what has changed
            occupancy, before = milliseconds_apart(self.occupancy, self.occupancy_was)
            queueing = f", {occupancy} of it occupancy (was {before})"
        return f"{self._edge} {_word(self)}: {flight}{queueing}{_doubt(self)}"


@dataclass(frozen=True, slots=True)
class LossChange(_ChangeOnEdge):
    """A directed edge between stages that has turned lossy, alternates between two levels, or has recovered from that.

    ``was`` and ``now`` are mean flights and ``extra`` is the additional flight of a late message, in seconds. ``share`` is the
    share of late messages, 0 after a recovery.
    """

    was: float
    now: float
    share: float
    extra: float
    is_healed: bool
    is_flapping: bool = False
    confidence: float = 1.0

    @property
    def kind(self) -> ChangeKind:
        """The property that has changed."""
        return ChangeKind.LOSS

    def __str__(self) -> str:
        if self.is_healed:
            return f"{self._edge} healed{_flapping(self)}: no message is held up any more{_doubt(self)}"
        late = f"{100 * self.share:.0f} % of its messages are {_milliseconds(self.extra)} late"
        return f"{self._edge} lossy{_flapping(self)}: {late}, the others as fast as ever{_doubt(self)}"


Change = StageChange | EdgeChange | LossChange
"""Any change that the detector finds."""


def _in_replica(replica: int | None, *stages: int) -> Where:
    return stages if replica is None else (replica, *stages)


def _word(change: StageChange | EdgeChange) -> str:
    word = "healed" if change.is_healed else "slow" if change.is_slower else "faster"
    return f"{word}{_flapping(change)}"


def _flapping(change: Change) -> str:
    return " (flapping)" if change.is_flapping else ""


def _doubt(change: Change) -> str:
    return "" if change.confidence >= SURE else f", {100 * change.confidence:.0f} % sure"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
