"""Inserts into a program the messages of one job's transport."""

from __future__ import annotations

from dataclasses import dataclass

from adaptra.passes.insert_comm import InsertComm
from adaptra.passes.insert_crossing import InsertCrossing
from adaptra.passes.lower_comm import LowerComm
from adaptra.program import Kind, Program
from adaptra.program.dependencies import other_end, peer_stage
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

    def of_plan(self, plan: Plan, program: Program) -> Program:
        """Return a program with the messages that it has under a plan."""
        cost = plan.case.cost
        ahead = None if self.with_loss else program.microbatches
        lowered = InsertComm.for_contract(self.contract, ahead).apply(program, cost)
        slow = plan.delegated if lowered.is_one_pipeline else _links_over(lowered, plan.delegated)
        crossing = InsertCrossing.for_contract(self.contract, self.changing)
        return crossing.apply(LowerComm(slow=slow).apply(lowered, cost), cost)

    def of_forwards(self, program: Program, cost: CostModel) -> Program:
        """Return a program of forwards at home with its messages."""
        return InsertComm.for_contract(self.contract).apply(program, cost)


def _links_over(lowered: Program, edges: Edges) -> Edges:
    """Return the links of workers that carry a program's messages over these directed edges of stages."""
    sends = [op for order in lowered.orders for op in order if op.kind in (Kind.SEND_F, Kind.SEND_B)]
    crossing = [(op, other_end(op)) for op in sends if (op.stage, peer_stage(op)) in edges]
    found = {tuple(lowered.holder(end.replica, end.stage, end.microbatch) for end in ends) for ends in crossing}
    return tuple(sorted((source, destination) for source, destination in found))
