"""Plans of several replicas: legal, within memory, no shorter than the bound, and as short as published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import random_case

from adaptra.errors import PlanError
from adaptra.passes.route import route_around_lost
from adaptra.planning.job_planner import plan_job, work_bound
from adaptra.program.verify import verify
from adaptra.simulation.cost import Case, CostModel
from adaptra.simulation.job_case import JobCase
from adaptra.simulation.period import simulate_period


def even_case(replicas: int, stages: int, microbatches: int, *lost: tuple[int, int]) -> JobCase:
    workers = frozenset(replica * stages + stage for replica, stage in lost)
    pipeline = Case(CostModel.uniform(stages, 1, 1, 1), microbatches, tuple(range(stages)))
    return replace(JobCase.of(pipeline, replicas, 3.0), lost=workers)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 100_000), st.booleans())
def test_plans_of_random_jobs_are_legal_and_not_below_the_bound(seed: int, links: bool) -> None:
    case = random_case(seed, links=links)
    program = plan_job(case, effort=20_000)
    verify(program, hands_over=case.hands_over)
    simulated = simulate_period(program, case)
    assert program.routing is not None
    assert simulated.period >= work_bound(case, program.routing) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("lost", "period"),
    [((), 22.0), (((1, 2),), 30.0), (((0, 1), (1, 2)), 30.0), (((0, 2), (1, 2)), 57.0)],
)
def test_the_published_example_takes_the_published_time(lost: tuple[tuple[int, int], ...], period: float) -> None:
    # ReCycle's example: 3 replicas of 4 stages, 6 microbatches, STEP takes 3. All but the healthy one are at the work bound.
    case = even_case(3, 4, 6, *lost)
    assert simulate_period(plan_job(case), case).period == period


def test_the_same_arguments_give_the_same_plan() -> None:
    case = random_case(11)
    assert str(plan_job(case)) == str(plan_job(case))


def test_shares_of_lost_workers_are_even_and_contiguous() -> None:
    routing = route_around_lost(even_case(4, 2, 6, (1, 1)))
    assert [str(route) for route in routing.routes if route.replica == 1] == [
        "route 1 0-1 by 2,1",
        "route 1 2-3 by 2,5",
        "route 1 4-5 by 2,7",
    ]
    turns = route_around_lost(replace(even_case(3, 1, 4, (1, 0)), hands_over=False))
    assert [turns.holder(1, 0, microbatch) for microbatch in range(4)] == [0, 2, 0, 2]


@given(st.integers(0, 10_000))
def test_shares_of_a_stages_workers_differ_by_one_at_most(seed: int) -> None:
    case = random_case(seed)
    routing = route_around_lost(case)
    for stage in range(case.stages):
        computed = [
            routing.holder(replica, stage, microbatch)
            for replica in range(case.replicas)
            for microbatch in range(case.microbatches)
        ]
        counts = [computed.count(worker) for worker in routing.column(stage)]
        assert max(counts) - min(counts) <= 1


def test_memory_is_kept() -> None:
    case = replace(even_case(3, 4, 6, (1, 2)), memory=(4, 4, 4, 4))
    simulated = simulate_period(plan_job(case, budget=0.05), case)
    assert max(simulated.held) <= 4
    assert not simulated.over_memory
    assert simulated.period <= 33.0


def test_a_budget_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^budget of 0 seconds: expected a positive number$"):
        plan_job(even_case(1, 1, 1), budget=0)
