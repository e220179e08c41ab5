"""The order that a rank lowers for itself is its part of the whole program with all messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import random_case, random_job_program

from adaptra.errors import PassError
from adaptra.passes import InsertComm, LowerComm
from adaptra.passes.insert_crossing import InsertCrossing
from adaptra.program import Program
from adaptra.program.schedules import zbv
from adaptra.program.transport_contract import Contract
from adaptra.program.verify import verify
from adaptra.program.verify_messages import verify_messages
from adaptra.runtime.control.plans.plan import Edges, Plan
from adaptra.runtime.worker.step.lowering import Lowering
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

EARLY = Contract(send_waits_for_receiver=True, in_order=False)
LATE = Contract(send_waits_for_receiver=False, in_order=False)


def plan_of(program: Program, cost: CostModel, delegated: Edges = ()) -> Plan:
    return Plan(1, program, Case(cost, program.microbatches, program.placement), 1.0, 1.0, "test", delegated)


def links_over(program: Program, edges: Edges) -> Edges:
    """The links of workers over which messages of these edges of stages go, by the routes alone."""
    paths = [path for of_replica in program.routing.path_of for path in of_replica]
    return tuple(sorted({(path[a], path[b]) for path in paths for a, b in edges if path[a] != path[b]}))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 100_000), st.sampled_from([EARLY, LATE]), st.booleans(), st.booleans())
def test_a_rank_has_its_part_of_the_whole(seed: int, contract: Contract, with_loss: bool, delegates: bool) -> None:
    case = replace(random_case(seed, shapes=True), hands_over=True)
    program, cost = random_job_program(case, seed), case.cost
    edges = ((0, 1),) if delegates and len(set(case.placement[:2])) == 2 and not program.is_forward_only else ()
    ahead = None if with_loss else program.microbatches
    whole = InsertComm.for_contract(contract, ahead).apply(program, cost)
    whole = LowerComm(edges if program.is_one_pipeline else links_over(program, edges)).apply(whole, cost)
    whole = InsertCrossing.for_contract(contract, case.changing).apply(whole, cost)
    verify(whole, changing=case.changing)
    lowering = Lowering(contract, case.changing, with_loss)
    plan = plan_of(program, cost, edges)
    for rank in range(program.ranks):
        own = lowering.of_plan(plan, program, rank)
        assert own.orders[rank] == whole.orders[rank]
        assert [op.lane for op in own.orders[rank]] == [op.lane for op in whole.orders[rank]]
        assert own.compute_only() == program
        verify_messages(own, rank, changing=case.changing)


def test_an_edge_that_carries_nothing_is_refused_by_the_ranks_at_its_ends() -> None:
    program, cost = zbv(2, 2), CostModel.uniform(4, 1, 1, 1)
    lowering = Lowering(LATE, frozenset(), with_loss=True)
    plan = plan_of(program, cost, ((1, 2),))
    assert lowering.of_plan(plan, program, 0).orders[0]
    with pytest.raises(PassError, match=r"sends nothing over 1>2: expected some of 0>1 1>0"):
        lowering.of_plan(plan, program, 1)
