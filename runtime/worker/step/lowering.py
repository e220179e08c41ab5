"""Inserts into a program the messages of one rank, as its transport wants them."""

from __future__ import annotations

from dataclasses import dataclass

from adaptra.passes.insert_comm import InsertComm
from adaptra.passes.insert_crossing import InsertCrossing
from adaptra.passes.lower_comm import LowerComm
from adaptra.program import Program
from adaptra.program.dependencies import SENT_BY, other_end
from adaptra.program.transport_contract import Contract
from adaptra.runtime.control.plans.plan import Edges, Plan
from adaptra.simulation.cost import CostModel


@dataclass(frozen=True, slots=True)
class Lowering:
    """Inserts SEND and RECV, puts those of delegated edges on their lane, and adds what crosses replicas.

    Attributes:
        contract: What the transport promises.
        changing: The stages whose forwards change buffers.
        with_loss: Whether the stages return a loss. Without one there is no measurement and no new plan, so receives are posted
            early enough for any delay.
    """

    contract: Contract
    changing: frozenset[int]
    with_loss: bool

    def of_plan(self, plan: Plan, program: Program, rank: int) -> Program:
        """Return a program with both ends of all messages to and from a rank under a plan, and no other messages.

        Args:
            plan: The plan.
            program: Its program, without messages.
            rank: The rank, or the worker if there are several replicas.
        """
        ahead = None if self.with_loss else program.microbatches
        lowered = InsertComm.for_contract(self.contract, ahead).of_ranks(program, plan.case.cost, (rank,))
        if slow := _edges_at(rank, lowered, plan.delegated):
            lowered = LowerComm(slow=slow).apply(lowered, plan.case.cost)
        return InsertCrossing.for_contract(self.contract, self.changing).of_ranks(lowered, (rank,))

    def of_forwards(self, program: Program, cost: CostModel, rank: int) -> Program:
        """Return a program of forwards at home with both ends of a rank's messages."""
        return InsertComm.for_contract(self.contract).of_ranks(program, cost, (rank,))


def _edges_at(rank: int, lowered: Program, edges: Edges) -> Edges:
    """Return those of the directed edges that have an end on a rank, as ``lower-comm`` names them.

    With several replicas they are the links of workers that carry the rank's messages over these edges of stages.
    """
    if lowered.is_one_pipeline:
        return tuple(edge for edge in edges if rank in (lowered.placement[edge[0]], lowered.placement[edge[1]]))
    messages = [op for op in lowered.orders[rank] if op.kind.is_message and not op.kind.is_crossing]
    ends = [(other_end(op), op) if op.kind in SENT_BY else (op, other_end(op)) for op in messages]
    links = {tuple(map(lowered.rank_of, pair)) for pair in ends if (pair[0].stage, pair[1].stage) in edges}
    return tuple(sorted((source, destination) for source, destination in links))
