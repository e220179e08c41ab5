"""Schedules of sums: possible and complete, counted in rounds, and the same after their text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest

from adaptra.collectives.algorithms import LATE, REFERENCES, sum_schedule
from adaptra.collectives.rounds import ALGORITHMS, Algorithm, TermMessage, Value, direct
from adaptra.collectives.schedule import SumSchedule
from adaptra.collectives.verify import verify_sum
from adaptra.errors import ProgramTextError, ScheduleError


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("ranks", range(2, 10))
def test_rounds_are_possible_and_complete(name: str, ranks: int) -> None:
    algorithm: Algorithm = ALGORITHMS[name]
    for buckets in (1, 2, 5):
        parts = buckets * ranks
        schedule = sum_schedule(name, ranks, parts)
        verify_sum(schedule)
        pace = min(ranks - 1, 2)
        assert schedule.rounds == (2 * buckets * (ranks - 1) if algorithm is direct else pace * parts + 2 * ranks - 3)
        for rank in range(ranks):
            own = [one for one in schedule.messages if rank in (one.source, one.destination)]
            assert sorted(algorithm(ranks, parts, rank), key=str) == sorted(own, key=str)
        verify_sum(sum_schedule(name, ranks, parts + 1))
        with pytest.raises(ScheduleError, match="in the end"):
            verify_sum(replace(schedule, messages=schedule.messages[:-1]))


def three(*messages: TermMessage, late: tuple[int, ...] = ()) -> SumSchedule:
    return SumSchedule("drawn", 3, 1, late, messages)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([TermMessage(0, 0, 2, Value(0, 0, 3))], "round 0: 0>2:0=0..2: expected a value that its source can have"),
        ([TermMessage(0, 1, 2, Value(0, 1, 2)), TermMessage(1, 2, 0, Value(0, 1, 3))], "2>0:0=1..2: expected a value that its"),
        (
            [TermMessage(0, 0, 1, Value(0, 0, 1)), TermMessage(0, 1, 2, Value(0, 0, 2))],
            "1>2:0=0..1: expected a value that its s",
        ),
        (
            [TermMessage(0, 0, 2, Value(0, 0, 1)), TermMessage(0, 1, 2, Value(0, 1, 2))],
            "0>2:0=0 and 1>2:0=1: expected each rank",
        ),
        (
            [TermMessage(0, 0, 2, Value(0, 0, 1)), TermMessage(0, 0, 1, Value(0, 0, 1))],
            "0>2:0=0 and 0>1:0=0: expected each rank",
        ),
        ([TermMessage(0, 0, 2, Value(0, 0, 1)), TermMessage(1, 0, 2, Value(0, 0, 1))], "that its destination does not have"),
        ([TermMessage(0, 0, 2, Value(0, 0, 1))], "rank 0: expected the whole sum of part 0 in the end"),
    ],
)
def test_what_no_ranks_can_do_is_named(messages: list[TermMessage], why: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(why)):
        verify_sum(three(*messages))


def test_a_late_rank_that_owns_a_part_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"0>2:0=0: expected no such value for a late rank"):
        verify_sum(three(TermMessage(0, 0, 2, Value(0, 0, 1)), late=(2,)))


def test_schedules_that_fit_no_ranks_are_refused() -> None:
    for ranks, parts, late, why in (
        (1, 1, (), "ranks=1 parts=1: expected at least 2 ranks"),
        (3, 0, (), "expected at least 2 ranks and 1 part"),
        (3, 1, (3,), r"late ranks 3: expected some of 0\.\.2"),
        (4, 1, (2, 1), "in ascending order"),
        (3, 1, (1, 2), "late ranks 1,2 of 3: expected at least two ranks that are not late"),
    ):
        with pytest.raises(ScheduleError, match=why):
            SumSchedule("drawn", ranks, parts, late, ())
    with pytest.raises(ScheduleError, match="0>0:0=0: expected a message between two of 3 ranks"):
        three(TermMessage(0, 0, 0, Value(0, 0, 1)))
    with pytest.raises(ScheduleError, match="0>1:1=0: expected one of 1 parts"):
        three(TermMessage(0, 0, 1, Value(1, 0, 1)))
    with pytest.raises(ScheduleError, match="order of their rounds"):
        three(TermMessage(1, 0, 1, Value(0, 0, 1)), TermMessage(0, 1, 0, Value(0, 1, 2)))
    with pytest.raises(ScheduleError, match="algorithm 'tree': expected one of direct, chain, streamed, merge, swap"):
        sum_schedule("tree", 3, 3)
    with pytest.raises(ScheduleError, match="direct: late ranks 1: expected none"):
        sum_schedule("direct", 3, 3, (1,))


@pytest.mark.parametrize("name", (*ALGORITHMS, *LATE, *REFERENCES))
def test_text_round_trips(name: str, golden: Callable[[str, str], None]) -> None:
    for ranks in (3, 4, 5):
        schedule = sum_schedule(name, ranks, ranks, (ranks - 1,) if name in LATE else ())
        assert SumSchedule.parse(str(schedule)) == schedule
        golden(f"sums/{name}_{ranks}.sum", str(schedule))
    commented = f"# a comment\n\n{schedule}".replace("\n1:", "  # more\n 1:")
    assert SumSchedule.parse(commented) == schedule


HEADER = "sum drawn version=1 ranks=3 parts=1 late=- order=fold"


@pytest.mark.parametrize(
    ("text", "line", "column", "why"),
    [
        ("", 1, 1, "empty schedule: expected a line 'sum NAME"),
        (HEADER + " x", 1, 1, "order=fold x': expected 'sum NAME version=1 ranks=N"),
        (HEADER.replace("=1", "=2", 1), 1, 19, "version 2: this adaptra reads version 1"),
        (HEADER.replace("late=-", "late=4"), 1, 1, "late ranks 4: expected some of 0..2"),
        (f"{HEADER}\n0: 0>1:0=0 0>1:0", 2, 12, "message '0>1:0': expected SOURCE>DESTINATION:PART=RANK"),
        (f"{HEADER}\n0: 0>1:0=0\n0: 1>0:0=1", 3, 1, "'0:': expected 'ROUND:' with a round above 0"),
        (f"{HEADER}\n0:", 2, 1, "'0:': expected 'ROUND:' with a round above -1, and its messages"),
        (f"{HEADER}\n0: 0>1:0=0..0", 2, 4, "message '0>1:0=0..0': expected ranks below 3, and a single one without"),
        (f"{HEADER}\n0: 0>1:0=3", 2, 4, "0>1:0=3: expected one of 1 parts and a span of 3 ranks"),
        (f"{HEADER}\n0: 0>3:0=0", 2, 4, "0>3:0=0: expected a message between two of 3 ranks"),
        (f"{HEADER}\n0: 0>1:0=1..0", 2, 4, "expected one of 1 parts and a span of 3 ranks in their order"),
        (f"{HEADER}\n0: 0>1:00=0", 2, 4, "message '0>1:00=0': expected SOURCE"),
    ],
)
def test_a_text_that_is_no_schedule_is_named(text: str, line: int, column: int, why: str) -> None:
    with pytest.raises(ProgramTextError, match=re.escape(why)) as caught:
        SumSchedule.parse(text)
    assert (caught.value.line, caught.value.column) == (line, column)


@pytest.mark.parametrize("ranks", (3, 4, 5, 8))
def test_late_ranks_own_nothing_and_send_only_their_terms(ranks: int) -> None:
    for count in range(1, ranks - 1):
        for late in combinations(range(ranks), count):
            for parts in (1, ranks, 2 * ranks + 1):
                schedule = sum_schedule("streamed", ranks, parts, late)
                verify_sum(schedule)
                assert schedule.rounds_of_late <= (ranks - 1) * (1 - (-parts // (ranks - count)))
                sent = [one.value for one in schedule.messages if one.source in late]
                assert len(sent) == count * parts
                assert all(value.end == value.first + 1 for value in sent)


@pytest.mark.parametrize("ranks", (*range(3, 18), 22, 33, 48, 100, 256))
def test_merge_takes_the_parts_and_one_doubling(ranks: int) -> None:
    doublings = (ranks - 1).bit_length()
    for parts in (1, 2, ranks, 2 * ranks + 1) if ranks < 49 else (2,):
        schedule = sum_schedule("merge", ranks, parts, (ranks // 2,))
        verify_sum(schedule)
        assert schedule.rounds_of_late == parts + doublings
        with pytest.raises(ScheduleError, match="in the end"):
            verify_sum(replace(schedule, messages=schedule.messages[:-1]))


@pytest.mark.parametrize("ranks", (*range(3, 18), 22, 27, 48, 100, 251))
def test_swap_takes_one_round_less(ranks: int) -> None:
    doublings = (ranks - 1).bit_length()
    for parts in (1, 2, ranks, 2 * ranks + 1) if ranks < 49 else (2,):
        schedule = sum_schedule("swap", ranks, parts, (ranks - 1,))
        verify_sum(schedule)
        assert schedule.rounds_of_late == parts + doublings - (ranks > 3)
        with pytest.raises(ScheduleError, match="in the end"):
            verify_sum(replace(schedule, messages=schedule.messages[:-1]))


def test_48_ranks_take_52_rounds_for_47_parts() -> None:
    assert sum_schedule("swap", 48, 47, (47,)).rounds_of_late == 52


def test_late_algorithms_refuse_other_numbers_of_late_ranks() -> None:
    with pytest.raises(ScheduleError, match="merge: late ranks 0,1: expected one"):
        sum_schedule("merge", 4, 4, (0, 1))
    with pytest.raises(ScheduleError, match="swap: late rank 1: expected 3, whose term is the last of the fold"):
        sum_schedule("swap", 4, 4, (1,))
    with pytest.raises(ScheduleError, match="streamed: expected at least one late rank"):
        sum_schedule("streamed", 4, 4)


def test_references_make_the_sum_in_other_orders() -> None:
    for ranks in range(2, 18):
        for parts in (1, ranks, 2 * ranks + 1):
            around = sum_schedule("ring", ranks, parts)
            verify_sum(around)
            assert around.rounds == -(-parts // ranks) * 2 * (ranks - 1)
            doubled = sum_schedule("doubling", ranks, parts)
            verify_sum(doubled)
            is_power = ranks & (ranks - 1) == 0
            assert doubled.rounds == parts * (ranks.bit_length() - 1 + (0 if is_power else 2))
            for schedule in (around, doubled):
                with pytest.raises(ScheduleError, match="in the end"):
                    verify_sum(replace(schedule, messages=schedule.messages[:-1]))
    with pytest.raises(ScheduleError, match="in their order"):
        verify_sum(replace(sum_schedule("ring", 4, 4), is_fold=True))


def test_a_term_that_is_counted_twice_is_named() -> None:
    twice = SumSchedule("drawn", 4, 1, (), tuple(TermMessage(*one) for one in TWICE), is_fold=False)
    with pytest.raises(ScheduleError, match=r"round 2: 2>0:0=1\.\.2: expected the sum of ranks beside"):
        verify_sum(twice)


TWICE = ((0, 1, 0, Value(0, 1, 2)), (1, 1, 2, Value(0, 1, 2)), (2, 2, 0, Value(0, 1, 3)))


def test_a_term_that_comes_from_both_sides_is_named() -> None:
    sent = ((0, 1, 0, Value(0, 1, 2)), (0, 0, 3, Value(0, 0, 1)), (1, 2, 0, Value(0, 2, 3)), (2, 3, 0, Value(0, 3, 5)))
    both = SumSchedule("drawn", 4, 1, (), tuple(TermMessage(*one) for one in sent), is_fold=False)
    with pytest.raises(ScheduleError, match=r"round 2: 3>0:0=3\.\.0: expected each term once in a sum"):
        verify_sum(both)
