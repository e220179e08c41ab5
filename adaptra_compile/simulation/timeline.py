"""A timeline: when each op of a program ran and when each message travelled, simulated or measured.

The simulator and the runtime's monitor both produce it; reports, traces and explanations only read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from adaptra.program import Kind, Op, Program


class Source(Enum):
    """Where the times of a timeline come from."""

    SIMULATED = "simulated"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class OpInterval:
    """One compute op and when it held its rank's device."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class MessageInterval:
    """One message between two stages: handed over at ``posted``, on the edge from ``departed``, at its receiver at ``arrived``.

    ``kind`` is SEND_F or SEND_B and ``source`` the stage that sends. A measured message does not know how long it queued:
    it departed when it was handed over, or where sends wait for receivers when its receive was posted.
    """

    kind: Kind
    source: int
    destination: int
    microbatch: int
    posted: float
    departed: float
    arrived: float


@dataclass(frozen=True)
class Timeline:
    """When everything happened in one step.

    Attributes:
        program: The program that ran.
        source: Simulated or measured.
        ops: Per rank, its compute ops in execution order.
        messages: All messages between stages on different ranks, in order of ``posted``.
        seconds_per_unit: What one unit of the times is in seconds, or None when the unit is the case's own.
    """

    program: Program
    source: Source
    ops: tuple[tuple[OpInterval, ...], ...]
    messages: tuple[MessageInterval, ...]
    seconds_per_unit: float | None = None

    @property
    def start(self) -> float:
        """The earliest start of an op."""
        return min((order[0].start for order in self.ops if order), default=0.0)

    @property
    def end(self) -> float:
        """The latest end of an op."""
        return max((order[-1].end for order in self.ops if order), default=0.0)

    @property
    def makespan(self) -> float:
        """From time zero (simulated) or the first op's start (measured) to the end of the last op."""
        return self.end - (0.0 if self.source is Source.SIMULATED else self.start)

    @property
    def busy(self) -> tuple[float, ...]:
        """Per rank, how long its device worked."""
        return tuple(sum(interval.end - interval.start for interval in order) for order in self.ops)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Per rank, how long its device idled within the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    def __iter__(self) -> Iterator[OpInterval]:
        for order in self.ops:
            yield from order
