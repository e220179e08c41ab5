"""Each rank verifies its own messages, and together they refuse what the verifier of the whole refuses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import damaged, random_case, random_job_program

from adaptra.errors import InvalidProgramError
from adaptra.passes import InsertComm
from adaptra.passes.insert_crossing import InsertCrossing
from adaptra.program import Kind, Program
from adaptra.program.program import MESSAGE_KINDS
from adaptra.program.verify import verify
from adaptra.program.verify_messages import verify_messages

TWO_RANKS = """
schedule two placement=0,1 microbatches=2
0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0W0 0RECV_B1 0I1 0W1
1: 1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1I1 1SEND_B1 1W1
"""


def refusals(program: Program, changing: frozenset[int] = frozenset()) -> list[str]:
    """The errors of the ranks that refuse their messages."""
    errors: list[str] = []
    for rank in range(program.ranks):
        try:
            verify_messages(program, rank, changing=changing)
        except InvalidProgramError as error:
            errors.append(str(error))
    return errors


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 100_000), st.sampled_from(["late", "ahead"]))
def test_messages_are_refused_by_a_rank_if_the_whole_is_refused(seed: int, receives: str) -> None:
    case = replace(random_case(seed, shapes=True), hands_over=True)
    whole = InsertComm(receives).apply(random_job_program(case, seed), case.cost)
    crossing = InsertCrossing(buffers=tuple(sorted(case.changing)), receives=receives)
    whole = crossing.apply(whole, case.cost)
    assert refusals(whole, case.changing) == []
    bad = damaged(whole, seed, MESSAGE_KINDS)
    if not refusals(bad, case.changing):
        verify(bad, changing=case.changing)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "0F0 0SEND_F0 0F1",
            "0F0 0F1 0SEND_F0",
            "0SEND_F0, op 2 of rank 0, stands behind 0F1, op 1 of rank 0: expected it right behind 0F0, op 0 of rank 0",
        ),
        (
            "1RECV_F1 1F1",
            "1F1 1RECV_F1",
            "1RECV_F1, op 6 of rank 1, stands behind 1F1, op 5 of rank 1, which needs it: expected it before",
        ),
        ("1I0 1SEND_B0", "1I0", "1SEND_B0 is missing on rank 1: 1I0 has a message to send; 0RECV_B0 is op 4 of rank 0"),
        ("1RECV_F0 1F0", "1RECV_F1 1RECV_F0 1F0", "two: 1RECV_F1 stands twice"),
        ("0SEND_F1", "0SEND_F1@delegate", "expected both ends of a message on one lane"),
    ],
)
def test_a_message_at_a_wrong_place_is_told(old: str, new: str, message: str) -> None:
    assert refusals(Program.parse(TWO_RANKS)) == []
    assert old in TWO_RANKS
    errors = refusals(Program.parse(TWO_RANKS.replace(old, new)))
    assert any(re.search(re.escape(message), error) for error in errors), errors


def test_a_channel_out_of_order_is_told() -> None:
    early = TWO_RANKS.replace("1RECV_F0", "1RECV_F1 1RECV_F0").replace("1W0 1RECV_F1", "1W0")
    told = ["received in the order in which they are sent" in error for error in refusals(Program.parse(early))]
    assert told == [True, True]


def test_what_crosses_replicas_may_not_be_left_out_as_a_whole() -> None:
    case = next(case for seed in range(1000) if (case := random_case(seed)).hands_over and case.replicas > 1)
    seeds = (InsertComm("late").apply(random_job_program(case, seed), case.cost) for seed in range(100))
    program = next(one for one in seeds if any(one.routing.away(0)))
    verify(program, changing=case.changing)
    assert any(Kind.RECV_INPUT.value in error for error in refusals(program, case.changing))
