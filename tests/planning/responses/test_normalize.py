"""Normalisation: published numbers, every choice tried on small jobs, and the workers that move."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from jobs import even_case, random_case

from adaptra.errors import PlanError
from adaptra.planning.responses.normalize import losses, normalized, role_moves, stage_work, with_moves
from adaptra.simulation.case import Case


@pytest.mark.parametrize(
    ("replicas", "stages", "microbatches", "number", "expected", "work"),
    [
        (3, 4, 6, 1, (0, 0, 0, 1), 30),
        (3, 4, 6, 5, (1, 1, 1, 2), 57),
        (6, 4, 8, 9, (2, 2, 2, 3), 51),
        (6, 4, 32, 6, (1, 1, 2, 2), 147),
        (8, 8, 16, 9, (1, 1, 1, 1, 1, 1, 1, 2), 69),
        (8, 8, 64, 17, (2, 2, 2, 2, 2, 2, 2, 3), 312),
        (2, 4, 8, 3, (0, 1, 1, 1), 51),
        (4, 2, 8, 5, (2, 3), 99),
    ],
)
def test_losses_and_work_are_those_of_the_model_of_recycle(
    replicas: int, stages: int, microbatches: int, number: int, expected: tuple[int, ...], work: float
) -> None:
    """Rows of a table of ReCycle's model (SOSP 2024): F, I and W of 1, an optimizer of 3."""
    case = even_case(replicas, stages, microbatches, 3.0)
    found = normalized(case, number)
    assert found == expected
    assert worst(case, found) == work


@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_has_less_work_or_fewer_moves(seed: int) -> None:
    case = replace(random_case(seed), slow={})
    before = losses(case)
    choices = [one for one in product(range(case.replicas), repeat=case.stages) if sum(one) == sum(before)]
    least = min(worst(case, one) for one in choices)
    assert worst(case, normalized(case, sum(before))) == least
    moves = role_moves(case)
    after = losses(with_moves(case, moves))
    assert worst(case, after) == least
    fewest = min(distance(before, one) for one in choices if worst(case, one) == least)
    assert len(moves) == distance(before, after) == fewest


def test_each_move_takes_a_live_worker_to_a_lost_place() -> None:
    case = even_case(8, 4, 16)
    chance = random.Random(3)
    for _ in range(20):
        lost = frozenset(case.worker(replica, 1) for replica in chance.sample(range(8), 6)) | {case.worker(0, 3)}
        broken = replace(case, lost=lost)
        moves = role_moves(broken)
        assert {move.place for move in moves} <= lost
        assert not {move.worker for move in moves} & lost
        assert len(with_moves(broken, moves).lost) == len(lost)


def test_a_worker_of_a_replica_that_is_broken_anyway_moves_first() -> None:
    case = replace(even_case(4, 3, 8), lost=frozenset({1, 4}))
    (move,) = role_moves(case)
    assert (move.worker // 3, move.place) in ((0, 1), (1, 4))
    assert {worker // 3 for worker in with_moves(case, [move]).lost} == {0, 1}


def test_a_slow_worker_does_not_move_and_counts_as_what_it_does() -> None:
    case = replace(even_case(3, 2, 6), slow={5: 2.0})
    assert stage_work(case, 1, 0) == 3 * 8.0, "7, 7 and 4 of 18 microbatches take 21, 21 and 24"
    assert normalized(case, 1) == (1, 0)
    assert role_moves(replace(case, lost=frozenset({3}))) != ()
    assert all(move.worker != 5 for move in role_moves(replace(case, lost=frozenset({3}))))


def test_a_stage_without_a_worker_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^7 lost workers: expected at most 6, so that a worker lives on each stage$"):
        normalized(even_case(3, 3, 2), 7)


def worst(case: Case, chosen: tuple[int, ...]) -> float:
    return max(stage_work(case, stage, number) for stage, number in enumerate(chosen))


def distance(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    return sum(max(0, now - was) for was, now in zip(before, after, strict=True))
