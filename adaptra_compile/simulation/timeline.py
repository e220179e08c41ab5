"""A timeline: the times of a program's ops and messages, simulated or measured.

The simulator and the runtime's monitor produce timelines. Reports, traces and explanations read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import other_end


class Source(Enum):
    """The origin of a timeline's times."""

    SIMULATED = "simulated"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class OpInterval:
    """One compute op, and the time in which it occupied its rank's device."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class MessageInterval:
    """One message between two ranks: sent at ``posted``, on the edge from ``departed``, at its receiver at ``arrived``.

    ``kind`` is that of the SEND and ``source`` the stage that sends. The queueing time of a measured message is not known. Its
    ``departed`` is the time of sending, or that of the posted receive if sends wait for receivers. ``replica`` is that of the
    microbatch.
    """

    kind: Kind
    source: int
    destination: int
    microbatch: int
    posted: float
    departed: float
    arrived: float
    replica: int = 0

    @property
    def send(self) -> Op:
        """The op that sends it."""
        return Op(self.source, self.kind, self.microbatch, None, self.replica)


@dataclass(frozen=True, slots=True)
class ReduceInterval:
    """The sum over the replicas of a rank's gradients, whose bytes are given.

    ``exposed`` is the time by which it delayed the rank's next step, None where not known. ``choice`` says in words who came
    late and how it was made; None where a job does not choose.
    """

    rank: int
    start: float
    end: float
    nbytes: int
    exposed: float | None = None
    choice: str | None = None


@dataclass(frozen=True)
class Timeline:
    """The times of one step.

    Attributes:
        program: The program that ran.
        source: Whether the times are simulated or measured.
        ops: The compute ops of each rank in execution order.
        messages: All messages between ranks, in order of ``posted``. A simulation has those between stages alone.
        seconds_per_unit: The unit of the times in seconds, or None for the case's own unit.
        reduces: The sums over the replicas, one per measured rank; none without replicas or if simulated.
    """

    program: Program
    source: Source
    ops: tuple[tuple[OpInterval, ...], ...]
    messages: tuple[MessageInterval, ...]
    seconds_per_unit: float | None = None
    reduces: tuple[ReduceInterval, ...] = ()

    def ends_of(self, message: MessageInterval) -> tuple[int, int]:
        """Return the ranks that send and receive a message."""
        send = message.send
        return self.program.rank_of(send), self.program.rank_of(other_end(send))

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
        """The time from zero (simulated) or the first op's start (measured) to the end of the last op."""
        return self.end - (0.0 if self.source is Source.SIMULATED else self.start)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time per rank that its device worked."""
        return tuple(sum(interval.end - interval.start for interval in order) for order in self.ops)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The time per rank that its device idled within the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    def __iter__(self) -> Iterator[OpInterval]:
        for order in self.ops:
            yield from order
