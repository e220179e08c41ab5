"""Passes on programs of several replicas: messages between the workers of the routes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import even_case, random_case, random_job_program

from adaptra.errors import PassError
from adaptra.passes import InsertComm, SplitBackward
from adaptra.planning.routes.job_planner import plan_job
from adaptra.program import Kind, Op, Program
from adaptra.program.placement import v_shaped
from adaptra.program.verify import verify
from adaptra.simulation.case import Case
from adaptra.simulation.simulate import simulate


def fold_of(case: Case) -> str:
    return "handover" if case.hands_over else "contributions"


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 100_000), st.sampled_from([("late", None), ("ahead", None), ("ahead", 1), ("ahead", 3)]))
def test_any_program_gets_exactly_its_messages_in_channel_order(seed: int, options: tuple[str, int | None]) -> None:
    case = random_case(seed, shapes=True)
    program = random_job_program(case, seed)
    lowered = InsertComm(*options, fold=fold_of(case)).apply(program, case.cost)
    verify(lowered, hands_over=case.hands_over, barrier=case.barrier)
    assert lowered.compute_only() == program
    assert Program.parse(str(lowered)) == lowered
    assert simulate(lowered, case).to_json() == simulate(program, case).to_json()


def test_stages_of_one_worker_send_nothing() -> None:
    case = replace(even_case(2, 4, 3), placement=v_shaped(2))
    lowered = InsertComm().apply(plan_job(case, effort=1), case.cost)
    verify(lowered)
    sends = {(op.kind, op.stage) for order in lowered.orders for op in order if op.kind.is_message and "SEND" in op.kind.value}
    assert sends == {(Kind.SEND_F, 0), (Kind.SEND_F, 2), (Kind.SEND_B, 1), (Kind.SEND_B, 3)}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 100_000))
def test_split_backward_keeps_the_order_with_messages_or_without(seed: int) -> None:
    case = random_case(seed, shapes=True)
    program = random_job_program(case, seed)
    for given_program in (program, InsertComm("late", fold=fold_of(case)).apply(program, case.cost)):
        split = SplitBackward().apply(given_program, case.cost)
        verify(split, hands_over=case.hands_over, barrier=case.barrier)
        assert not any(op.kind is Kind.B for order in split.orders for op in order)
        for before, order in zip(given_program.orders, split.orders, strict=True):
            fused = [op for op in before if op.kind is Kind.B]
            assert len(order) == len(before) + len(fused)
            for op in fused:
                at = order.index(replace(op, kind=Kind.I))
                assert order[at + 1] == Op(op.stage, Kind.W, op.microbatch, None, op.replica)


def test_a_fold_that_is_none_is_refused() -> None:
    with pytest.raises(PassError, match=r"^insert-comm: fold=left: expected fold=handover or fold=contributions$"):
        InsertComm(fold="left")
