"""The verifier on programs of several replicas: each rule with a program that breaks it alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import random_case, random_job_program

from adaptra.errors import ScheduleError
from adaptra.program import Kind, Program
from adaptra.program.verify import verify
from adaptra.simulation.job import with_updates

HEAD = """schedule x version=2 stages=2 microbatches=2
workers 0,1 2,3
route 0 0-1 by 0,1
route 1 0 by 2,3
route 1 1 by 2,1
"""
ORDERS: tuple[str, ...] = (
    "0:0F0 0:0F1 0:0I0 0:0W0 0:0B1 0REDUCE 0STEP",
    "0:1F0 0:1B0 0:1F1 0:1B1 1:1F1 1:1I1 1:1W1 1REDUCE 1STEP",
    "1:0F0 1:0F1 1:0B0 1:0B1 0REDUCE 0STEP",
    "1:1F0 1:1B0 1REDUCE 1STEP",
)


def program(*orders: str) -> Program:
    return Program.parse(HEAD + "".join(f"{worker}: {order}\n" for worker, order in enumerate(orders)))


def changed(worker: int, old: str, new: str) -> Program:
    orders: list[str] = [*ORDERS]
    assert old in orders[worker]
    orders[worker] = orders[worker].replace(old, new).strip()
    return program(*orders)


def refusal(refused: Program, **options: Any) -> str:
    with pytest.raises(ScheduleError) as error:
        verify(refused, **options)
    return str(error.value)


def test_the_program_that_the_others_damage_is_accepted() -> None:
    verify(program(*ORDERS))


@given(st.integers(0, 10_000))
def test_every_program_grown_by_running_it_verifies(seed: int) -> None:
    case = random_case(seed, shapes=True)
    grown = random_job_program(case, seed)
    verify(grown, hands_over=case.hands_over)
    verify(with_updates(grown), hands_over=case.hands_over, barrier=case.barrier)


@pytest.mark.parametrize(
    ("worker", "old", "new", "message"),
    [
        (3, "1:1F0", "2:1F0", "x: 2:1F0, op 0 of worker 3: replica 2 does not exist: expected 0..1"),
        (3, "1:1F0", "1:2F0", "x: 1:2F0, op 0 of worker 3: stage 2 does not exist: expected 0..1"),
        (3, "1:1F0", "1:1F2", "x: 1:1F2, op 0 of worker 3: microbatch 2 does not exist: expected 0..1"),
        (
            3,
            "1:1F0",
            "1:1F1 1:1F0",
            "x: 1:1F1, op 0 of worker 3: the route of microbatch 1 of replica 1 passes stage 1 on worker 1",
        ),
        (3, "1REDUCE", "0REDUCE", "x: 0REDUCE, op 2 of worker 3: worker 3 does not have stage 0"),
        (3, "1:1B0", "", "x: replica 1, stage 1, microbatch 0: worker 3 has 1:1F0: expected 1:1F0 1:1I0 1:1W0 or 1:1F0 1:1B0"),
        (3, "1STEP", "", "x: worker 3 has no 1STEP: expected one REDUCE and one STEP per worker and stage"),
        (
            3,
            "1:1B0 1REDUCE",
            "1REDUCE 1:1B0",
            "x: 1REDUCE, op 1 of worker 3, stands before 1:1B0, op 2 of worker 3: expected it behind",
        ),
        (
            3,
            "1REDUCE 1STEP",
            "1STEP 1REDUCE",
            "x: 1STEP, op 2 of worker 3, stands before 1REDUCE, op 3 of worker 3: expected it behind",
        ),
        (3, "1STEP", "1STEP 1STEP", "x: 1STEP stands twice: op 3 of worker 3 and op 4 of worker 3"),
        (
            0,
            "0:0F0 0:0F1",
            "0:0F1 0:0F0",
            "x: 0:0F0, op 1 of worker 0, stands behind 0:0F1, op 0 of worker 0: expected the forwards of a stage in microbatch "
            "order, which makes results independent of the plan",
        ),
    ],
)
def test_a_broken_rule_names_the_op_and_both_sides(worker: int, old: str, new: str, message: str) -> None:
    assert refusal(changed(worker, old, new)) == message


def test_other_replicas_are_refused_in_a_program_of_one_pipeline() -> None:
    routed = program(*ORDERS)
    orders = tuple(tuple(op for op in order if op.replica == 0) for order in routed.orders[:2])
    verify(Program.of_pipeline("y", (0, 1), 2, orders))
    other = tuple(tuple(replace(op, replica=1) for op in order) for order in orders)
    assert refusal(Program.of_pipeline("y", (0, 1), 2, other)) == (
        "y: 1:0F0, op 0 of rank 0: replica 1 does not exist: expected 0..0"
    )


def test_a_weight_gradient_waits_for_the_worker_that_has_the_accumulator() -> None:
    late = changed(3, "1:1F0 1:1B0", "1:1F0 1:1I0 1:1W0")
    verify(late)
    # Worker 1 computes W1 of replica 1, whose accumulator comes from worker 3, before something that worker 3 waits for.
    stuck = program(
        "0:0F0 0:0F1 0:0B0 0:0B1",
        "1:1F1 1:1B1 0:1F0 0:1B0 0:1F1 0:1B1",
        "1:0F1 1:0F0 1:0B0 1:0B1",
        "1:1F0 1:1B0",
    )
    assert "1:0F0, op 1 of worker 2, stands behind 1:0F1" in refusal(stuck)
    ring = Program.parse(
        HEAD.replace("route 1 0 by 2,3\nroute 1 1 by 2,1", "route 1 0 by 2,1\nroute 1 1 by 2,3").replace(
            "route 0 0-1 by 0,1", "route 0 0 by 0,3\nroute 0 1 by 0,1"
        )
        + "0: 0:0F0 0:0F1 0:0B0 0:0B1\n1: 0:1F1 0:1B1 1:1F0 1:1B0\n2: 1:0F0 1:0F1 1:0B0 1:0B1\n3: 1:1F1 1:1B1 0:1F0 0:1B0\n"
    )
    text = refusal(ring)
    assert text.startswith("x: deadlock: 4 of 4 workers wait forever\n")
    assert "  worker 1: 0:1B1, op 1, waits for 0:1B0, op 3 of worker 3" in text
    assert "worker 3  " in text
    verify(ring, hands_over=False)


def test_behind_a_barrier_a_step_waits_for_the_reduce_of_all_workers() -> None:
    head = "schedule x version=2 stages=2 microbatches=1\nworkers 0,0 1,1\nroute 0 0 by 0,0\nroute 1 0 by 1,1\n"
    ops = "{0}:0F0 {0}:1F0 {0}:1B0 {0}:0B0"
    together = "".join(f"{one}: {ops.format(one)} 0REDUCE 1REDUCE 0STEP 1STEP\n" for one in range(2))
    apart = together.replace("1REDUCE 0STEP", "0STEP 1REDUCE")
    verify(Program.parse(head + together), barrier=True)
    verify(Program.parse(head + apart))
    text = refusal(Program.parse(head + apart), barrier=True)
    assert text.startswith(
        "x: deadlock: 2 of 2 workers wait forever\n  worker 0: 0STEP, op 5, waits for 1REDUCE, op 6 of worker"
    )


def test_an_accumulator_that_is_handed_over_has_two_ends() -> None:
    messages = (
        "0:0F0 0:0SEND_F0 0:0F1 0:0SEND_F1 0:0RECV_B0 0:0I0 0:0W0 0:0RECV_B1 0:0B1",
        "0:1RECV_F0 0:1F0 0:1B0 0:1SEND_B0 0:1RECV_F1 0:1F1 0:1B1 0:1SEND_B1 "
        "1:1RECV_F1 1:1F1 1:1I1 1:1SEND_B1 1:1RECV_W1 1:1W1",
        "1:0F0 1:0SEND_F0 1:0F1 1:0SEND_F1 1:0RECV_B0 1:0B0 1:0RECV_B1 1:0B1",
        "1:1RECV_F0 1:1F0 1:1B0 1:1SEND_B0 1:1SEND_W0",
    )
    lowered = program(*messages)
    verify(lowered)
    assert "expected no accumulator to be handed over" in refusal(lowered, hands_over=False)
    orders = [order.replace("1:1RECV_W1 ", "") for order in messages]
    assert refusal(program(*orders)) == (
        "x: 1:1RECV_W1 is missing on worker 1: 1:1B0 has a message to send; 1:1SEND_W0 is op 4 of worker 3"
    )
    # Worker 1 receives the accumulator behind the op that needs it, and so waits for itself.
    behind = [messages[0], messages[1].replace("1:1RECV_W1 1:1W1", "1:1W1 1:1RECV_W1"), *messages[2:]]
    text = refusal(program(*behind))
    assert text.startswith("x: deadlock: ")
    assert "  worker 1: 1:1W1, op 12, waits for 1:1RECV_W1, op 13 of worker 1, behind it" in text
    assert "1:1SEND_W0" in text.splitlines()[-1]  # the grid of workers and steps
    # Worker 0 sends two activations to worker 1, which expects them the other way round.
    swapped = [messages[0], messages[1].replace("0:1RECV_F1 0:1F1", "0:1F1").replace("0:1RECV_F0", "0:1RECV_F1 0:1RECV_F0")]
    assert refusal(program(*swapped, *messages[2:])).startswith(
        "x: channel 0→1 forward, message 0: sent is 0:0SEND_F0, op 1 of worker 0, but received is 0:1RECV_F1, op 0 of worker 1"
    )
    within = [*messages[:3], messages[3].replace("1:1SEND_W0", "1:1SEND_W0 1:1RECV_W0")]
    assert "there is no microbatch -1 at the other end" in refusal(program(*within))


CROSSING: tuple[str, ...] = (
    "1:0RECV_INPUT1 0:0F0 0:0SEND_F0 0:0F1 0:0SEND_F1 1:0F1 1:0SEND_F1 0:0RECV_B0 0:0B0 0:0RECV_B1 0:0B1 "
    "1:0RECV_B1 1:0RECV_W1 1:0B1 1:0SEND_SUM1 0REDUCE 0STEP",
    "1:1RECV_TARGET0 1:1RECV_F0 1:1F0 1:1SEND_RESULT0 1:1B0 1:1SEND_B0 1:1SEND_W0 0:1RECV_F0 0:1F0 0:1B0 0:1SEND_B0 "
    "0:1RECV_F1 0:1F1 0:1B1 0:1SEND_B1 1REDUCE 1STEP",
    "1:0SEND_INPUT1 1:0F0 1:0SEND_F0 1:0RECV_B0 1:0B0 1:0SEND_W0 1:0RECV_SUM1 0REDUCE 0STEP",
    "1:1SEND_TARGET0 1:1RECV_F1 1:1F1 1:1RECV_RESULT0 1:1RECV_W1 1:1B1 1:1SEND_B1 1REDUCE 1STEP",
)
"""Worker 0 computes microbatch 1 of replica 1 on stage 0, and worker 1 its microbatch 0 on stage 1."""


def crossing(worker: int, old: str, new: str) -> Program:
    head = HEAD.replace("route 1 0 by 2,3\nroute 1 1 by 2,1", "route 1 0 by 2,1\nroute 1 1 by 0,3")
    orders = [order.replace(old, new) if number == worker else order for number, order in enumerate(CROSSING)]
    assert orders[worker] != CROSSING[worker] or old == new
    return Program.parse(head + "".join(f"{number}: {order.strip()}\n" for number, order in enumerate(orders)))


def test_what_crosses_replicas_is_accepted_as_a_whole_or_not_at_all() -> None:
    whole = crossing(0, "", "")
    verify(whole)
    verify(whole.only(frozenset(op.kind for order in whole.orders for op in order if not op.kind.is_crossing)))


@pytest.mark.parametrize(
    ("worker", "old", "new", "message"),
    [
        (
            2,
            "1:0SEND_INPUT1 ",
            "",
            "x: 1:0SEND_INPUT1 is missing on worker 2: worker 0 computes microbatch 1 of replica 1 on stage 0; "
            "1:0RECV_INPUT1 is op 0 of worker 0",
        ),
        (
            1,
            "1:1RECV_TARGET0 ",
            "",
            "x: 1:1RECV_TARGET0 is missing on worker 1: worker 1 computes microbatch 0 of replica 1 on stage 1; "
            "1:1SEND_TARGET0 is op 0 of worker 3",
        ),
        (
            3,
            " 1:1RECV_RESULT0",
            "",
            "x: 1:1RECV_RESULT0 is missing on worker 3: worker 1 computes microbatch 0 of replica 1 on stage 1; "
            "1:1SEND_RESULT0 is op 3 of worker 1",
        ),
        (
            0,
            "1:0RECV_INPUT1",
            "1:0RECV_INPUT1 1:0SEND_INPUT1",
            "x: 1:0SEND_INPUT1, op 1 of worker 0: the home of stage 0 of replica 1 is worker 2",
        ),
        (
            2,
            "1:0SEND_INPUT1",
            "1:0SEND_INPUT1 1:0SEND_INPUT0",
            "x: 1:0SEND_INPUT0, op 1 of worker 2: no message is needed: microbatch 0 is computed at home, on worker 2",
        ),
        (
            0,
            "1:0RECV_INPUT1",
            "1:0RECV_INPUT1 1:0RECV_TARGET1",
            "x: 1:0RECV_TARGET1, op 1 of worker 0: no such message is needed on stage 0",
        ),
    ],
)
def test_a_crossing_message_is_refused_that_is_missing_or_has_no_use(worker: int, old: str, new: str, message: str) -> None:
    assert refusal(crossing(worker, old, new)) == message


def test_who_receives_its_inputs_too_late_waits_for_itself() -> None:
    text = refusal(
        crossing(
            0,
            "1:0RECV_INPUT1 0:0F0 0:0SEND_F0 0:0F1 0:0SEND_F1 1:0F1",
            "0:0F0 0:0SEND_F0 0:0F1 0:0SEND_F1 1:0F1 1:0RECV_INPUT1",
        )
    )
    assert text.startswith("x: deadlock: ")
    assert "  worker 0: 1:0F1, op 4, waits for 1:0RECV_INPUT1, op 5 of worker 0, behind it" in text


def test_homes_that_give_their_batch_away_too_late_wait_for_each_other() -> None:
    """Each computes for the other first, and has not yet sent what the other one needs."""
    order = (
        "{1}:0RECV_INPUT0 {1}:0RECV_TARGET0 {0}:0SEND_INPUT0 {1}:0F0 {1}:0SEND_RESULT0 {1}:0B0 {1}:0SEND_SUM0 "
        "{0}:0SEND_TARGET0 {0}:0RECV_RESULT0 {0}:0RECV_SUM0\n"
    )
    text = "schedule x version=2 stages=1 microbatches=1\nworkers 0 1\nroute 0 0 by 1\nroute 1 0 by 0\n"
    text += f"0: {order.format(0, 1)}1: {order.format(1, 0)}"
    shown = refusal(Program.parse(text), ordered_channels=False)
    assert shown.startswith("x: deadlock: 2 of 2 workers wait forever\n")
    assert "  worker 0: 1:0F0, op 3, waits for 1:0SEND_TARGET0, op 7 of worker 1" in shown


def test_results_and_accumulators_share_a_channel() -> None:
    """Worker 1 sends the results of microbatch 0 before its accumulator, but worker 3 receives them at the end."""
    late = crossing(3, "1:1RECV_RESULT0 1:1RECV_W1 1:1B1", "1:1RECV_W1 1:1B1 1:1RECV_RESULT0")
    verify(late, ordered_channels=False)
    assert refusal(late).startswith(
        "x: channel 1→3 bulk, message 0: sent is 1:1SEND_RESULT0, op 3 of worker 1, but received is 1:1RECV_W1"
    )


def test_a_sum_that_is_sent_behind_the_reduce_that_needs_it_is_a_deadlock() -> None:
    """The REDUCE of worker 0 waits for that of worker 2, which has not got the sum of its replica."""
    text = refusal(crossing(0, "1:0SEND_SUM1 0REDUCE", "0REDUCE 1:0SEND_SUM1"))
    assert text.startswith("x: deadlock: ")
    assert "  worker 0: 0REDUCE, op 14, waits for 1:0SEND_SUM1, op 15 of worker 0, behind it" in text


def test_no_sum_comes_home_where_each_worker_adds_up_its_own() -> None:
    whole = crossing(0, "", "")
    kept = whole.only(frozenset(Kind) - {Kind.SEND_W, Kind.RECV_W})
    assert refusal(kept, hands_over=False) == "x: 1:0SEND_SUM1, op 13 of worker 0: no such message is needed on stage 0"
    verify(kept.only(frozenset(Kind) - {Kind.SEND_SUM, Kind.RECV_SUM}), hands_over=False)


def test_inputs_and_accumulators_share_a_channel() -> None:
    """Worker 2 gives worker 0 the accumulator of microbatch 0 before the inputs of microbatch 1, which are needed first."""
    before = "1:0F0 1:0SEND_F0 1:0RECV_B0 1:0B0 1:0SEND_W0"
    late = crossing(2, f"1:0SEND_INPUT1 {before}", f"{before} 1:0SEND_INPUT1")
    assert refusal(late).startswith(
        "x: channel 2→0 bulk, message 0: sent is 1:0SEND_W0, op 4 of worker 2, but received is 1:0RECV_INPUT1, op 0 of worker 0"
    )


BUFFERS: tuple[str, ...] = (
    "1:0RECV_INPUT1 1:0RECV_TARGET1 0:0F0 0:0B0 0:0F1 0:0B1 0:0F2 0:0B2 1:0RECV_BUFFERS1 1:0F1 1:0SEND_BUFFERS2 "
    "1:0SEND_RESULT1 1:0RECV_W1 1:0B1 1:0SEND_W1",
    "1:0SEND_INPUT1 1:0SEND_TARGET1 2:0RECV_INPUT0 2:0RECV_INPUT1 2:0RECV_INPUT2 2:0RECV_TARGET0 2:0RECV_TARGET1 "
    "2:0RECV_TARGET2 2:0RECV_BUFFERS0 2:0F0 2:0SEND_RESULT0 2:0B0 2:0F1 2:0SEND_RESULT1 2:0B1 2:0F2 2:0SEND_BUFFERS3 "
    "2:0SEND_RESULT2 2:0B2 2:0SEND_SUM2 1:0F0 1:0SEND_BUFFERS1 1:0B0 1:0SEND_W0 1:0RECV_BUFFERS2 1:0F2 1:0RECV_RESULT1 "
    "1:0RECV_W2 1:0B2",
    "2:0SEND_INPUT0 2:0SEND_INPUT1 2:0SEND_INPUT2 2:0SEND_TARGET0 2:0SEND_TARGET1 2:0SEND_TARGET2 2:0SEND_BUFFERS0 "
    "2:0RECV_RESULT0 2:0RECV_RESULT1 2:0RECV_BUFFERS3 2:0RECV_RESULT2 2:0RECV_SUM2",
)
"""Worker 0 computes microbatch 1 of replica 1, and worker 1 all of replica 2."""


def buffers(*changes: tuple[int, str, str]) -> Program:
    """The program with changes of a worker's order."""
    orders = list(BUFFERS)
    for worker, old, new in changes:
        assert orders[worker].count(old) == 1
        orders[worker] = orders[worker].replace(old, new)
    head = "schedule x version=2 stages=1 microbatches=3\nworkers 0 1 2\nroute 0 0-2 by 0\n"
    head += "route 1 0 by 1\nroute 1 1 by 0\nroute 1 2 by 1\nroute 2 0-2 by 1\n"
    return Program.parse(head + "".join(f"{worker}: {order}\n" for worker, order in enumerate(orders)))


def test_buffers_go_from_worker_to_worker_where_forwards_change_them_and_nowhere_else() -> None:
    whole = buffers()
    verify(whole, changing={0})
    assert refusal(whole) == "x: 1:0RECV_BUFFERS1, op 8 of worker 0: no such message is needed on stage 0"
    without = whole.only(frozenset(Kind) - {Kind.SEND_BUFFERS, Kind.RECV_BUFFERS})
    verify(without)
    assert refusal(without, changing={0}) == (
        "x: 1:0SEND_BUFFERS1 is missing on worker 1: buffers of stage 0 of replica 1 go from worker 1 to 0 for "
        "microbatch 1; 1:0RECV_BUFFERS1 is missing too"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [(1, "1:0SEND_BUFFERS1 ", "")],
            "x: 1:0SEND_BUFFERS1 is missing on worker 1: buffers of stage 0 of replica 1 go from worker 1 to 0 for "
            "microbatch 1; 1:0RECV_BUFFERS1 is op 8 of worker 0",
        ),
        (
            [(2, "2:0RECV_BUFFERS3 ", "")],
            "x: 2:0RECV_BUFFERS3 is missing on worker 2: buffers of stage 0 of replica 2 go from worker 1 to 2 at the "
            "end; 2:0SEND_BUFFERS3 is op 16 of worker 1",
        ),
        (
            [(0, "1:0SEND_BUFFERS2", "1:0SEND_BUFFERS2 1:0SEND_BUFFERS2")],
            "x: 1:0SEND_BUFFERS2 stands twice: op 10 of worker 0 and op 11 of worker 0",
        ),
        (
            [(0, "1:0F1 1:0SEND_BUFFERS2", "1:0F1 1:0SEND_BUFFERS1")],
            "x: 1:0SEND_BUFFERS1, op 10 of worker 0: the home of stage 0 of replica 1 is worker 1",
        ),
        (
            [(0, "1:0RECV_BUFFERS1", "1:0RECV_BUFFERS2")],
            "x: 1:0RECV_BUFFERS2, op 8 of worker 0: the home of stage 0 of replica 1 is worker 1",
        ),
        (
            [(1, "2:0SEND_BUFFERS3", "2:0SEND_BUFFERS0")],
            "x: 2:0SEND_BUFFERS0, op 16 of worker 1: the home of stage 0 of replica 2 is worker 2",
        ),
        (
            [(1, "2:0SEND_BUFFERS3", "2:0SEND_BUFFERS2")],
            "x: 2:0SEND_BUFFERS2, op 16 of worker 1: no message is needed: worker 1 has the buffers",
        ),
        (
            [(1, "2:0SEND_BUFFERS3", "2:0SEND_BUFFERS4")],
            "x: 2:0SEND_BUFFERS4, op 16 of worker 1: microbatch 4 does not exist: expected 0..3",
        ),
    ],
)
def test_buffers_that_are_missing_doubled_or_misplaced_are_refused(changes: list[tuple[int, str, str]], message: str) -> None:
    assert refusal(buffers(*changes), changing={0}) == message


def test_buffers_that_are_received_in_another_order_than_sent_are_refused() -> None:
    """Worker 1 sends its own replica's to worker 0 behind the results of microbatch 0 of the other one, say."""
    late = buffers((2, "2:0RECV_BUFFERS3 2:0RECV_RESULT2", "2:0RECV_RESULT2 2:0RECV_BUFFERS3"))
    verify(late, ordered_channels=False, changing={0})
    assert refusal(late, changing={0}).startswith(
        "x: channel 1→2 bulk, message 2: sent is 2:0SEND_BUFFERS3, op 16 of worker 1, but received is 2:0RECV_RESULT2"
    )


@pytest.mark.parametrize(
    ("change", "waits"),
    [
        (
            (0, "1:0RECV_BUFFERS1 1:0F1", "1:0F1 1:0RECV_BUFFERS1"),
            "  worker 0: 1:0F1, op 8, waits for 1:0RECV_BUFFERS1, op 9 of worker 0, behind it",
        ),
        (
            (1, "1:0F0 1:0SEND_BUFFERS1", "1:0SEND_BUFFERS1 1:0F0"),
            "  worker 1: 1:0SEND_BUFFERS1, op 20, waits for 1:0F0, op 21 of worker 1, behind it",
        ),
        (
            (
                1,
                "1:0SEND_BUFFERS1 1:0B0 1:0SEND_W0 1:0RECV_BUFFERS2 1:0F2",
                "1:0B0 1:0SEND_W0 1:0RECV_BUFFERS2 1:0F2 1:0SEND_BUFFERS1",
            ),
            "  worker 1: 1:0F2, op 24, waits for 1:0SEND_BUFFERS2, op 10 of worker 0",
        ),
    ],
)
def test_buffers_that_move_too_early_or_too_late_are_a_deadlock(change: tuple[int, str, str], waits: str) -> None:
    """Those of another forward than the one before never reach a worker."""
    text = refusal(buffers(change), ordered_channels=False, changing={0})
    assert text.startswith("x: deadlock: ")
    assert waits in text
