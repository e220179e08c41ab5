"""The verifier: each rule with the error it gives, and agreement with an independent check on damaged programs."""

from __future__ import annotations

import pickle
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import programs

from adaptra.errors import InvalidProgramError, ScheduleError
from adaptra.program import Kind, Op, Program
from adaptra.program.schedules import zb_h2
from adaptra.program.verify import verify


def program(*orders: str, microbatches: int = 1, placement: tuple[int, ...] | None = None) -> Program:
    placed = ",".join(map(str, placement or range(len(orders))))
    lines = [f"{rank}: {order}" for rank, order in enumerate(orders)]
    return Program.parse("\n".join([f"schedule x placement={placed} microbatches={microbatches}", *lines]))


def refusal(refused: Program, **options: Any) -> str:
    with pytest.raises(ScheduleError) as error:
        verify(refused, **options)
    return str(error.value)


@given(programs())
def test_every_program_grown_by_running_it_verifies(grown: Program) -> None:
    verify(grown)


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (["0F0 0B0", "2F0 1F0 1B0"], "x: 2F0, op 0 of rank 1: stage 2 does not exist: expected 0..1"),
        (["0F0 0B0 1F0", "1B0"], "x: 1F0, op 2 of rank 0: the placement puts stage 1 on rank 1"),
        (["0F0 0B0 0F1", "1F0 1B0"], "x: 0F1, op 2 of rank 0: microbatch 1 does not exist: expected 0..0"),
        (["0F0 0B0 0F0", "1F0 1B0"], "x: 0F0 stands twice: op 0 of rank 0 and op 2 of rank 0"),
        (["0F0@fast 0B0", "1F0 1B0"], "x: 0F0@fast, op 0 of rank 0: a compute op has no lane, this one has 'fast'"),
        (["0F0 0B0", "1B0"], "x: stage 1, microbatch 0: rank 1 has 1B0: expected 1F0 1I0 1W0 or 1F0 1B0"),
        (["0F0 0I0", "1F0 1B0"], "x: stage 0, microbatch 0: rank 0 has 0F0 0I0: expected 0F0 0I0 0W0 or 0F0 0B0"),
        (
            ["0F0 0I0 0W0 0B0", "1F0 1B0"],
            "x: stage 0, microbatch 0: rank 0 has 0F0 0I0 0W0 0B0: expected 0F0 0I0 0W0 or 0F0 0B0",
        ),
        (["0F0", ""], "x: stage 1, microbatch 0: rank 1 has nothing: expected 1F0"),
        (
            ["0F0 0SEND_F0 0SEND_B0", "1RECV_F0 1F0"],
            "x: 0SEND_B0, op 2 of rank 0: there is no stage -1 at the other end: stages are 0..1",
        ),
        (
            ["0F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"],
            "x: 0SEND_F0 is missing on rank 0: 0F0 has a message to send; 1RECV_F0 is op 0 of rank 1",
        ),
        (
            ["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"],
            "x: 1SEND_B0 is missing on rank 1: 1B0 has a message to send; 0RECV_B0 is missing too",
        ),
        (
            ["0F0 0SEND_F0 0RECV_B0", "1RECV_F0 1F0"],
            "x: 0RECV_B0, op 2 of rank 0: expected no backward message, as no op computes a gradient",
        ),
        (
            ["0F0 0SEND_F0@fast", "1RECV_F0@slow 1F0"],
            "x: 0SEND_F0@fast, op 1 of rank 0, but 1RECV_F0@slow, op 0 of rank 1: expected both ends of a message on one lane",
        ),
        (
            ["0F0 0SEND_F0@fast", "1RECV_F0 1F0"],
            "x: 0SEND_F0@fast, op 1 of rank 0, but 1RECV_F0, op 0 of rank 1: expected both ends of a message on one lane",
        ),
    ],
)
def test_a_broken_rule_names_the_op_and_both_sides(orders: list[str], message: str) -> None:
    assert refusal(program(*orders)) == message


@pytest.mark.parametrize(
    ("orders", "rank", "number"),
    [
        (["0F0 0B0 1F0", "1B0"], 0, 2),
        (["0F0 0B0 0F0", "1F0 1B0"], 0, 2),
        (["0F0 0B0", "1B0"], 1, None),
        (["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"], 1, None),
        (["0F0 0SEND_F0@fast", "1RECV_F0@slow 1F0"], 1, 0),
        (["0B0 0F0", "1F0 1B0"], 0, 0),
    ],
)
def test_the_op_of_a_broken_rule_is_told_by_place(orders: list[str], rank: int, number: int | None) -> None:
    with pytest.raises(InvalidProgramError) as error:
        verify(program(*orders))
    assert (error.value.rank, error.value.number) == (rank, number)
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.rank, again.number) == (str(error.value), rank, number)


def test_a_message_within_a_rank_is_refused() -> None:
    text = refusal(program("0F0 0SEND_F0 1RECV_F0 1F0", placement=(0, 0)))
    assert text == "x: 0SEND_F0, op 1 of rank 0: no message is needed: stages 0 and 1 are both on rank 0"


def test_a_lane_that_the_text_form_could_not_hold_is_refused() -> None:
    orders = ((Op(0, Kind.F, 0), Op(0, Kind.SEND_F, 0, "Fast")), (Op(1, Kind.RECV_F, 0, "Fast"), Op(1, Kind.F, 0)))
    assert "lane 'Fast': expected a lower-case letter" in refusal(Program.of_pipeline("x", (0, 1), 1, orders))


@pytest.mark.parametrize(
    ("order", "late", "before", "what"),
    [
        ("0F1 0F0 0B0 0B1", "0F0, op 1", "0F1, op 0", "forwards"),
        ("0F0 0F1 0B1 0B0", "0B0, op 3", "0B1, op 2", "input gradients"),
        ("0F0 0F1 0I1 0I0 0W0 0W1", "0I0, op 3", "0I1, op 2", "input gradients"),
        ("0F0 0F1 0I0 0I1 0W1 0W0", "0W0, op 5", "0W1, op 4", "weight gradients"),
        ("0F0 0F1 0I0 0B1 0W0", "0W0, op 4", "0B1, op 3", "weight gradients"),
        ("0F0 0F1 0B1 0I0 0W0", "0I0, op 3", "0B1, op 2", "input gradients"),
    ],
)
def test_microbatches_out_of_order_within_a_stage_are_refused(order: str, late: str, before: str, what: str) -> None:
    assert refusal(program(order, microbatches=2)) == (
        f"x: {late} of rank 0, stands behind {before} of rank 0: expected the {what} of a stage in microbatch order, "
        f"which makes results independent of the plan"
    )


def test_receives_reordered_against_sends_are_refused_for_ordered_channels_only() -> None:
    swapped = program(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        microbatches=2,
    )
    assert refusal(swapped) == (
        "x: channel 0→1 forward, message 0: sent is 0SEND_F0, op 1 of rank 0, but received is 1RECV_F1, op 0 of rank 1, which "
        "0SEND_F1, op 3 of rank 0, sends: expected messages to be received in the order in which they are sent"
    )
    verify(swapped, ordered_channels=False)


def test_the_two_directions_between_two_ranks_are_channels_of_their_own() -> None:
    """In a V of four stages rank 0 sends forward from stage 0 and backward from stage 3; the two may overtake each other."""
    verify(
        program(
            "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0F1 0SEND_F1 3RECV_F1 3F1 3B1 3SEND_B1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1RECV_F1 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0 1F1 2F1 2SEND_F1 2RECV_B1 2B1 1B1 1SEND_B1",
            microbatches=2,
            placement=(0, 1, 1, 0),
        )
    )


def test_a_receive_may_be_posted_any_distance_ahead() -> None:
    verify(
        program(
            "0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1",
            "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
            microbatches=2,
        )
    )


def test_a_deadlock_names_every_waiting_rank_and_shows_the_grid() -> None:
    crossed = program("0F0 0I0 0F1 0W0 0I1 0W1", "1F0 1F1 1I0 1W0 1I1 1W1", "2F0 2I0 2W0 2F1 2I1 2W1", microbatches=2)
    assert refusal(crossed) == (
        "x: deadlock: 3 of 3 ranks wait forever\n"
        "  rank 0: 0I0, op 1, waits for 1I0, op 2 of rank 1\n"
        "  rank 1: 1F1, op 1, waits for 0F1, op 2 of rank 0\n"
        "  rank 2: 2F1, op 3, waits for 1F1, op 1 of rank 1\n"
        "  step    0    1    2    3    4\n"
        "  rank 0  0F0  .    .    .    .    →0I0  0F1  0W0  0I1  0W1\n"
        "  rank 1  .    1F0  .    .    .    →1F1  1I0  1W0  1I1  1W1\n"
        "  rank 2  .    .    2F0  2I0  2W0  →2F1  2I1  2W1"
    )


def test_a_rank_that_waits_for_an_op_behind_it_says_so() -> None:
    text = refusal(program("0I0 0F0 0W0"))
    assert "  rank 0: 0I0, op 0, waits for 0F0, op 1 of rank 0, behind it\n" in text


def test_a_lowered_deadlock_waits_for_the_send_and_not_for_its_own_posted_receive() -> None:
    text = refusal(program("0RECV_B0 0I0 0F0 0SEND_F0 0W0", "1RECV_F0 1F0 1B0 1SEND_B0"))
    assert "rank 0: 0I0, op 1, waits for 0F0, op 2 of rank 0, behind it\n" in text
    assert "rank 1: 1F0, op 1, waits for 0SEND_F0, op 3 of rank 0\n" in text


def test_a_receive_behind_its_compute_op_is_refused() -> None:
    text = refusal(program("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"))
    assert "rank 1: 1F0, op 0, waits for 1RECV_F0, op 1 of rank 1, behind it\n" in text


def test_a_rank_that_reached_its_end_is_marked_so_in_the_grid() -> None:
    text = refusal(program("0F0 0W0 0I0", "1F0 1B0"))
    assert text.endswith("  step    0    1    2\n  rank 0  0F0  .    .    →0W0  0I0\n  rank 1  .    1F0  1B0  end")


def test_a_program_of_a_hundred_thousand_ops_verifies_in_far_less_than_the_time_limit() -> None:
    verify(Program.parse(str(zb_h2(64, 512))))


def test_the_grid_of_a_long_program_shows_the_last_steps_only() -> None:
    whole = zb_h2(8, 64)
    kept, rest = whole.orders[3][:60], whole.orders[3][60:]
    gradients_first = sorted(rest, key=lambda op: [Kind.I, Kind.F, Kind.W].index(op.kind))
    text = refusal(
        Program.of_pipeline("long", whole.placement, 64, (*whole.orders[:3], (*kept, *gradients_first), *whole.orders[4:]))
    )
    lines = text.splitlines()
    assert lines[0].startswith("long: deadlock: ")
    grid = lines[next(number for number, line in enumerate(lines) if line.startswith("  step")) :]
    assert len(grid) == 1 + 8
    assert all("→" in line for line in grid[1:] if "end" not in line)
    assert max(map(len, grid)) < 150


def precedence(checked: Program) -> dict[Op, set[Op]]:
    """Which op must run before which, written from scratch: the program can run exactly if this has no cycle."""
    before: dict[Op, set[Op]] = {op: set() for order in checked.orders for op in order}
    for order in checked.orders:
        for first, second in pairwise(order):
            before[second].add(first)
    lowered = any(op.kind in (Kind.SEND_F, Kind.SEND_B) for op in before)

    def input_from(op: Op, neighbour: int, kinds: list[Kind], send: Kind, receive: Kind) -> set[Op]:
        if not 0 <= neighbour < checked.stages:
            return set()
        if lowered and checked.placement[neighbour] != checked.placement[op.stage]:
            return {Op(neighbour, send, op.microbatch), Op(op.stage, receive, op.microbatch)}
        return {Op(neighbour, kind, op.microbatch) for kind in kinds}

    for op, earlier in before.items():
        of_this = {kind: Op(op.stage, kind, op.microbatch) for kind in Kind}
        if op.kind is Kind.F:
            earlier |= input_from(op, op.stage - 1, [Kind.F], Kind.SEND_F, Kind.RECV_F)
        elif op.kind in (Kind.I, Kind.B):
            earlier |= {of_this[Kind.F]} | input_from(op, op.stage + 1, [Kind.I, Kind.B], Kind.SEND_B, Kind.RECV_B)
        elif op.kind is Kind.W:
            earlier.add(of_this[Kind.I])
        elif op.kind is Kind.SEND_F:
            earlier.add(of_this[Kind.F])
        elif op.kind is Kind.SEND_B:
            earlier |= {of_this[Kind.I], of_this[Kind.B]}
        earlier &= before.keys()
    return before


def out_of_order(checked: Program) -> bool:
    """Whether some stage has its F, its I and B, or its W and B ops out of microbatch order."""
    for order in checked.orders:
        for stage in range(checked.stages):
            for kinds in ("F", "IB", "WB"):
                found = [op.microbatch for op in order if op.stage == stage and op.kind.value in kinds]
                if found != sorted(found):
                    return True
    return False


def channels_disagree(checked: Program) -> bool:
    """Whether some messages between two ranks in one direction are received in another order than sent."""
    for step, letter in ((+1, "F"), (-1, "B")):
        for source, sender in enumerate(checked.orders):
            for destination, receiver in enumerate(checked.orders):
                sent = [
                    (op.stage + step, op.microbatch)
                    for op in sender
                    if op.kind.value == f"SEND_{letter}" and checked.placement[op.stage + step] == destination
                ]
                received = [
                    (op.stage, op.microbatch)
                    for op in receiver
                    if op.kind.value == f"RECV_{letter}" and checked.placement[op.stage - step] == source
                ]
                if sent != received:
                    return True
    return False


def stuck(checked: Program) -> bool:
    try:
        TopologicalSorter(precedence(checked)).prepare()
    except CycleError:
        return True
    return False


def moved(draw: st.DrawFn, whole: Program) -> Program:
    """The program with one op taken out and put back somewhere, mostly on its own rank."""
    orders = [list(order) for order in whole.orders]
    source = draw(st.sampled_from([rank for rank, order in enumerate(orders) if order]))
    destination = draw(st.sampled_from([source] * 4 + list(range(len(orders)))))
    op = orders[source].pop(draw(st.integers(0, len(orders[source]) - 1)))
    orders[destination].insert(draw(st.integers(0, len(orders[destination]))), op)
    return Program.of_pipeline("moved", whole.placement, whole.microbatches, tuple(map(tuple, orders)))


@settings(max_examples=300)
@given(st.composite(lambda draw: moved(draw, draw(programs())))())
def test_a_program_with_one_op_moved_is_valid_or_refused_with_the_right_error(damaged: Program) -> None:
    misplaced = [op for rank, order in enumerate(damaged.orders) for op in order if damaged.placement[op.stage] != rank]
    if misplaced:
        expected = "the placement puts stage"
    elif out_of_order(damaged):
        expected = "in microbatch order"
    elif channels_disagree(damaged):
        expected = "in the order in which they are sent"
    elif stuck(damaged):
        expected = "wait forever"
    else:
        verify(damaged)
        return
    assert expected in refusal(damaged)
    if expected == "in the order in which they are sent":
        if stuck(damaged):
            assert "wait forever" in refusal(damaged, ordered_channels=False)
        else:
            verify(damaged, ordered_channels=False)


@given(programs(), st.data())
def test_a_program_with_one_op_dropped_is_refused_by_name(whole: Program, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([rank for rank, order in enumerate(whole.orders) if order]))
    number = data.draw(st.integers(0, len(whole.orders[rank]) - 1))
    op = whole.orders[rank][number]
    orders = [*whole.orders]
    orders[rank] = (*orders[rank][:number], *orders[rank][number + 1 :])
    remains = Program.of_pipeline("dropped", whole.placement, whole.microbatches, tuple(orders))
    assume(not remains.is_forward_only)
    text = refusal(remains)
    if op.kind.is_compute:
        assert text.startswith(f"dropped: stage {op.stage}, microbatch {op.microbatch}: rank {rank} has ")
    else:
        assert text.startswith(f"dropped: {op} is missing on rank {rank}: ")
