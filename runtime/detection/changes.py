"""What the detector finds: a stage or a directed edge that has turned slow, faster or healthy again, and in which way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

SHOWN_OCCUPANCY: Final = 50e-6
"""Seconds; less is not worth a word."""

SURE: Final = 0.99
"""Confidences from here on are not worth a word."""

Where = tuple[int, ...]
"""A stage, or the two stages of a directed edge."""

AGREEMENT: Final = 0.2
"""Two values agree about a change if they differ by at most this part of it."""


class ChangeKind(Enum):
    """What about a stage or an edge has changed."""

    COMPUTE = "compute"
    """How long ops take."""
    LATENCY = "latency"
    """How long a message is under way that does not queue."""
    BANDWIDTH = "bandwidth"
    """How long a message keeps the next one from departing."""
    FLIGHT = "flight"
    """One of these two: no message followed another so closely that they could be told apart."""
    LOSS = "loss"
    """Some messages are held up, as those that are lost and sent again, while others are as fast as ever."""


@dataclass(frozen=True, slots=True)
class StageChange:
    """A stage whose ops take longer or shorter: seconds of F + I + W before, now, and when it was calibrated.

    ``confidence`` is the least probability that this is no noise, as of every change.
    """

    stage: int
    was: float
    now: float
    calibrated: float
    is_healed: bool
    is_flapping: bool = False
    confidence: float = 1.0

    @property
    def where(self) -> Where:
        """The stage."""
        return (self.stage,)

    @property
    def kind(self) -> ChangeKind:
        """What has changed."""
        return ChangeKind.COMPUTE

    @property
    def is_slower(self) -> bool:
        """Whether it takes longer than before."""
        return self.now > self.was

    def __str__(self) -> str:
        factor = f"{self.now / max(self.calibrated, 1e-9):.2f}x"
        return f"stage {self.stage} {_word(self)}: {factor} the calibrated time{_doubt(self)}"


@dataclass(frozen=True, slots=True)
class EdgeChange:
    """A directed edge between stages whose messages take longer or shorter; seconds.

    ``was``, ``now`` and ``calibrated`` are flights of a message that does not queue; ``occupancy`` is the part of ``now`` for
    which it keeps the next one from departing, as far as is known, ``occupancy_was`` that part of ``was``, and
    ``occupancy_most`` what that part may be at most.
    """

    source: int
    destination: int
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
    def where(self) -> Where:
        """The edge."""
        return self.source, self.destination

    @property
    def kind(self) -> ChangeKind:
        """Whichever makes up most of the change."""
        most = 0.5 * abs(self.now - self.was)
        if abs(self.occupancy - self.occupancy_was) > most:
            return ChangeKind.BANDWIDTH
        return ChangeKind.LATENCY if self.occupancy_most - self.occupancy_was <= most else ChangeKind.FLIGHT

    @property
    def is_slower(self) -> bool:
        """Whether messages take longer than before; those that queue wait for an occupancy each."""
        return self.now + self.occupancy > self.was + self.occupancy_was

    def __str__(self) -> str:
        edge = f"edge {self.source}→{self.destination} {_word(self)}"
        queueing = f", {_milliseconds(self.occupancy)} of it occupancy" if self.occupancy >= SHOWN_OCCUPANCY else ""
        return f"{edge}: {_milliseconds(self.now)} (was {_milliseconds(self.was)}){queueing}{_doubt(self)}"


@dataclass(frozen=True, slots=True)
class LossChange:
    """A directed edge between stages whose path has turned lossy, or alternates between two levels, or has healed from that.

    ``was`` and ``now`` are the flights of the mean message, ``extra`` is what a late message takes longer; seconds. ``share``
    is that of the late messages, 0 once healed.
    """

    source: int
    destination: int
    was: float
    now: float
    share: float
    extra: float
    is_healed: bool
    is_flapping: bool = False
    confidence: float = 1.0

    @property
    def where(self) -> Where:
        """The edge."""
        return self.source, self.destination

    @property
    def kind(self) -> ChangeKind:
        """What has changed."""
        return ChangeKind.LOSS

    def __str__(self) -> str:
        edge = f"edge {self.source}→{self.destination}"
        flapping = " (flapping)" if self.is_flapping else ""
        if self.is_healed:
            return f"{edge} healed{flapping}: no message is held up any more{_doubt(self)}"
        late = f"{100 * self.share:.0f} % of its messages are {_milliseconds(self.extra)} late"
        return f"{edge} lossy{flapping}: {late}, the others as fast as ever{_doubt(self)}"


Change = StageChange | EdgeChange | LossChange
"""Anything that the detector finds."""


def _word(change: StageChange | EdgeChange) -> str:
    said = "healed" if change.is_healed else "slow" if change.is_slower else "faster"
    return f"{said} (flapping)" if change.is_flapping else said


def _doubt(change: Change) -> str:
    return "" if change.confidence >= SURE else f", {100 * change.confidence:.0f} % sure"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
