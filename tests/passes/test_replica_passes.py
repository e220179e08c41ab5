"""Passes on programs of several replicas: messages between the workers of the routes, and refusals by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import even_case, random_case, random_job_program

from adaptra.errors import PassError, ScheduleError
from adaptra.passes import AdaptOrder, FuseBackward, InsertComm, LowerComm, SplitBackward, parse_pipeline
from adaptra.passes.base import Pass
from adaptra.planning.routes.job_planner import plan_job
from adaptra.program import Kind, Op, Program
from adaptra.program.placement import v_shaped
from adaptra.program.verify import verify
from adaptra.simulation.job_case import JobCase
from adaptra.simulation.period import simulate_period

REROUTED = """schedule rerouted version=2 stages=2 microbatches=2
workers 0,1 2,-
route 0 0-1 by 0,1
route 1 0-1 by 2,1
0: 0:0F0 0:0F1 0:0B0 0:0B1 0REDUCE 0STEP
1: 0:1F0 0:1B0 1:1F0 1:1B0 0:1F1 0:1B1 1:1F1 1:1B1 1REDUCE 1STEP
2: 1:0F0 1:0F1 1:0B0 1:0B1 0REDUCE 0STEP
"""

HANDED_OVER = """schedule handed-over version=2 stages=2 microbatches=2
workers 0,1 2,3
route 0 0 by 0,1
route 0 1 by 0,3
route 1 0-1 by 2,3
0: 0:0F0 0:0F1 0:0I0 0:0W0 0:0I1 0:0W1
1: 0:1F0 0:1B0
2: 1:0F0 1:0F1 1:0B0 1:0B1
3: 0:1F1 0:1I1 1:1F0 1:1B0 1:1F1 1:1B1 0:1W1
"""


def fold_of(case: JobCase) -> str:
    return "handover" if case.hands_over else "contributions"


def insert(text: str, fold: str = "handover") -> list[str]:
    """The lines of the program's ops after insert-comm."""
    lowered = InsertComm("late", fold=fold).apply(Program.parse(text), even_case(2, 2, 2).cost)
    return str(lowered).splitlines()[-len(lowered.orders) :]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 100_000), st.sampled_from([("late", None), ("ahead", None), ("ahead", 1), ("ahead", 3)]))
def test_any_program_gets_exactly_its_messages_in_channel_order(seed: int, options: tuple[str, int | None]) -> None:
    case = random_case(seed, shapes=True)
    program = random_job_program(case, seed)
    lowered = InsertComm(*options, fold=fold_of(case)).apply(program, case.cost)
    verify(lowered, hands_over=case.hands_over, barrier=case.barrier)
    assert lowered.compute_only() == program
    assert Program.parse(str(lowered)) == lowered
    assert simulate_period(lowered, case).to_json() == simulate_period(program, case).to_json()


def test_messages_of_foreign_microbatches_carry_their_replica() -> None:
    assert insert(REROUTED) == [
        "0: 0:0F0 0:0SEND_F0 0:0F1 0:0SEND_F1 0:0RECV_B0 0:0B0 0:0RECV_B1 0:0B1 0REDUCE 0STEP",
        "1: 0:1RECV_F0 0:1F0 0:1B0 0:1SEND_B0 1:1RECV_F0 1:1F0 1:1B0 1:1SEND_B0 0:1RECV_F1 0:1F1 0:1B1 0:1SEND_B1 "
        "1:1RECV_F1 1:1F1 1:1B1 1:1SEND_B1 1REDUCE 1STEP",
        "2: 1:0F0 1:0SEND_F0 1:0F1 1:0SEND_F1 1:0RECV_B0 1:0B0 1:0RECV_B1 1:0B1 0REDUCE 0STEP",
    ]


def test_the_accumulator_is_handed_over_where_the_order_of_w_crosses_workers() -> None:
    handed = insert(HANDED_OVER)
    assert handed[1] == "1: 0:1RECV_F0 0:1F0 0:1B0 0:1SEND_B0 0:1SEND_W0"
    assert handed[3].endswith("1:1B1 1:1SEND_B1 0:1RECV_W1 0:1W1")
    assert insert(HANDED_OVER, fold="contributions") == [
        line.replace(" 0:1SEND_W0", "").replace(" 0:1RECV_W1", "") for line in handed
    ]


def test_stages_of_one_worker_send_nothing() -> None:
    case = replace(even_case(2, 4, 3), placement=v_shaped(2))
    lowered = InsertComm().apply(plan_job(case, effort=1), case.cost)
    verify(lowered)
    sends = {(op.kind, op.stage) for order in lowered.orders for op in order if op.kind.is_message and "SEND" in op.kind.value}
    assert sends == {(Kind.SEND_F, 0), (Kind.SEND_F, 2), (Kind.SEND_B, 1), (Kind.SEND_B, 3)}


def test_lanes_are_those_of_links_between_workers() -> None:
    program, cost = Program.parse(REROUTED), even_case(2, 2, 2).cost
    marked = parse_pipeline("insert-comm,lower-comm{slow=2>1}").apply(program, cost)
    on_lane = [op for order in marked.orders for op in order if op.lane is not None]
    assert sorted(map(str, on_lane)) == [f"1:{end}{number}@delegate" for end in ("0SEND_F", "1RECV_F") for number in (0, 1)]
    with pytest.raises(PassError, match=r"rerouted sends nothing over 0>2: expected some of 0>1 1>0 1>2 2>1$"):
        LowerComm(((0, 2),)).apply(marked, cost)


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


@pytest.mark.parametrize("step", [AdaptOrder(), FuseBackward()])
def test_passes_of_one_pipeline_refuse_by_name(step: Pass) -> None:
    with pytest.raises(ScheduleError, match=rf"^{step.name}: rerouted has 2 replicas: expected a program of one pipeline$"):
        step.apply(Program.parse(REROUTED), even_case(2, 2, 2).cost)


def test_a_fold_that_is_none_is_refused() -> None:
    with pytest.raises(PassError, match=r"^insert-comm: fold=left: expected fold=handover or fold=contributions$"):
        InsertComm(fold="left")
