"""The pass ``lower-comm``: puts the messages of slow edges on another lane."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from adaptra.errors import PassError
from adaptra.passes.base import EdgeSet, Pass, Word, option
from adaptra.program import Op, Program
from adaptra.program.dependencies import SENT_BY, other_end
from adaptra.simulation.cost import CostModel


@dataclass(frozen=True)
class LowerComm(Pass):
    """Mark SEND and RECV of the named directed edges with a lane, and remove the lane from all others.

    The result's lanes depend only on ``slow``, not on those of the incoming program. So an edge that is no longer named returns
    to the normal path, and other edges do not change.

    Guarantees: no op moves; both ends of a message are on the same lane. What crosses replicas for foreign microbatches takes
    no lane.

    Refuses: a program without communication ops if an edge is named, and an edge over which the program sends nothing.

    Attributes:
        slow: Directed edges between neighbouring stages, as (source, destination): ``slow=1>2+2>1``. With several replicas they
            are the links between workers.
        lane: The runtime's name of their path.
    """

    name: ClassVar[str] = "lower-comm"
    slow: tuple[tuple[int, int], ...] = option((), EdgeSet())
    lane: str = option("delegate", Word(r"[a-z][a-z0-9_.-]*", "a lower-case word such as delegate"))

    @property
    def uses_cost(self) -> bool:
        """False: no time decides anything."""
        return False

    def apply(self, program: Program, cost: CostModel) -> Program:
        """Return the program with its lanes set. ``cost`` is not used."""
        if self.slow and not program.is_lowered:
            raise PassError(f"{self}: {program.name} has no SEND and RECV to mark: run insert-comm first")
        used = {_edge(op, program) for order in program.orders for op in order if _takes_lanes(op)}
        for source, destination in self.slow:
            if (source, destination) not in used:
                known = " ".join(f"{a}>{b}" for a, b in sorted(used))
                raise PassError(f"{self}: {program.name} sends nothing over {source}>{destination}: expected some of {known}")
        orders = tuple(tuple(self._marked(op, program) for op in order) for order in program.orders)
        return replace(program, orders=orders)

    def _marked(self, op: Op, program: Program) -> Op:
        if not _takes_lanes(op):
            return op
        lane = self.lane if _edge(op, program) in self.slow else None
        # Most ops do not change, and lowering runs during training and shares its interpreter.
        return op if op.lane == lane else replace(op, lane=lane)


def _takes_lanes(op: Op) -> bool:
    return op.kind.is_message and not op.kind.is_crossing


def _edge(op: Op, program: Program) -> tuple[int, int]:
    """Return source and destination of a communication op: stages, or with several replicas workers."""
    ends = (other_end(op), op) if op.kind in SENT_BY else (op, other_end(op))
    by_stages = program.is_one_pipeline
    source, destination = (end.stage if by_stages else program.rank_of(end) for end in ends)
    return source, destination
