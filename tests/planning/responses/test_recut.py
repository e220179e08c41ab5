"""Re-cutting: what a cut holds, that none has less work, and that planned re-cuts beat routes alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from jobs import even_case, random_case

from adaptra.planning.responses.normalize import losses, stage_load, stage_work
from adaptra.planning.responses.recut import recuts
from adaptra.planning.routes.job_planner import plan_job
from adaptra.simulation.case import Case
from adaptra.simulation.simulate import simulate


@pytest.mark.parametrize("seed", range(30))
def test_no_other_cut_gives_the_busiest_worker_less_to_do(seed: int) -> None:
    case, pieces = replace(random_case(seed), slow={}), 3
    first = next(recuts(case, pieces))
    number = case.stages * pieces
    cuts = [(0, *inner, number) for inner in combinations(range(1, number), case.stages - 1)]
    assert worst(first.case) == pytest.approx(min(work_of(case, one, pieces) for one in cuts), rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_keeps_all_work_and_says_what_moves(seed: int) -> None:
    case = random_case(seed)
    for one in recuts(case, 4):
        assert sum(one.case.cost.forward) == pytest.approx(sum(case.cost.forward))
        assert sum(one.case.step) == pytest.approx(sum(case.step))
        assert sum(one.held) == pytest.approx(case.stages)
        assert all(0 <= received <= held for received, held in zip(one.received, one.held, strict=True))
        assert all(end > begin for begin, end in pairwise(one.begins))


def test_a_healthy_even_job_is_not_cut_elsewhere() -> None:
    case = replace(even_case(3, 4, 6, 3.0), memory=(8,) * 4)
    first = next(recuts(case, 12))
    assert first.begins == (0, 12, 24, 36, 48)
    assert first.received == (0, 0, 0, 0)
    assert first.case == case


def test_a_larger_stage_has_room_for_fewer_microbatches() -> None:
    case = replace(even_case(3, 4, 6), memory=(8,) * 4, lost=frozenset({6}))
    first = next(recuts(case, 12))
    assert first.case.memory is not None
    for memory, held in zip(first.case.memory, first.held, strict=True):
        assert memory * held <= 8 + 1e-9


def test_a_planned_recut_repeats_faster_than_routes_alone() -> None:
    case = replace(even_case(3, 4, 6, 3.0), lost=frozenset({6}))
    routed = simulate(plan_job(case, effort=100_000), case).period
    periods = [simulate(plan_job(one.case, effort=100_000), one.case).period for one in recuts(case, 12)]
    assert min(periods) < 0.87 * routed
    assert min(periods) >= min(worst(one.case) for one in recuts(case, 12)) - 1e-9


def worst(case: Case) -> float:
    return max(stage_work(case, stage, number) for stage, number in enumerate(losses(case)))


def work_of(case: Case, begins: tuple[int, ...], pieces: int) -> float:
    lost, cost = losses(case), case.cost
    found: list[float] = []
    for stage, (begin, end) in enumerate(pairwise(begins)):
        load = stage_load(case, stage, lost[stage])
        homes = [piece // pieces for piece in range(begin, end)]
        ops = sum(cost.forward[home] + cost.input_grad[home] + cost.weight_grad[home] for home in homes)
        found.append((load * ops + sum(case.step[home] + case.reduce[home] for home in homes)) / pieces)
    return max(found)
