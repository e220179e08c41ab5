"""Large jobs: the orders that are made on demand are legal, and their steps are never farther apart than the plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import even_case

from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.large_jobs import LargePlan, plan_large
from adaptra.program import Kind
from adaptra.program.dependencies import RULE, Row
from adaptra.program.verify import verify
from adaptra.simulation.case import Case, WorkerLink
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate


def check(case: Case) -> LargePlan | None:
    """Plan a case, and check the plan."""
    plan = plan_large(case)
    if plan is None:
        return None
    program = plan.program()
    verify(program, hands_over=case.hands_over)
    simulated = simulate(program, case)
    assert not simulated.over_memory
    assert plan.held == max(simulated.held)
    assert plan.bound.value * (1 - 1e-9) <= simulated.period <= plan.period * (1 + 1e-9)
    assert all(plan.order_of(worker) == order for worker, order in enumerate(program.orders))
    return plan


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a case with one to three lost workers, in at most a third of the replicas."""
    stages, replicas = draw(st.integers(1, 5)), draw(st.integers(3, 9))
    times = st.integers(0, 4).map(float)
    cost = CostModel(
        forward=tuple(draw(times) for _ in range(stages)),
        input_grad=tuple(draw(times) for _ in range(stages)),
        weight_grad=tuple(draw(times) for _ in range(stages)),
        latency_forward=tuple(draw(times) for _ in range(stages - 1)),
        latency_backward=tuple(draw(times) for _ in range(stages - 1)),
        occupancy_forward=(0.0,) * (stages - 1),
        occupancy_backward=(0.0,) * (stages - 1),
    )
    job = Case(cost, draw(st.integers(1, 12)), tuple(range(stages))).of_replicas(replicas, draw(times), draw(times))
    homes = draw(st.lists(st.integers(0, replicas - 1), min_size=1, max_size=replicas // 3, unique=True))
    lost = frozenset(job.worker(home, draw(st.integers(0, stages - 1))) for home in homes for _ in range(2))
    memory = draw(st.sampled_from([None, 2 * stages + 2, stages + 3]))
    return replace(job, lost=lost, hands_over=draw(st.booleans()), hand_over=draw(times), memory=memory and (memory,) * stages)


@settings(max_examples=150)
@given(cases())
def test_steps_are_never_farther_apart_than_the_plan_says(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("replicas", "stages", "microbatches", "lost", "most"),
    [(12, 4, 16, 1, 1.1), (16, 6, 48, 2, 1.06), (20, 8, 64, 4, 1.06), (40, 8, 64, 3, 1.05)],
)
def test_plans_are_near_their_bound(replicas: int, stages: int, microbatches: int, lost: int, most: float) -> None:
    case = replace(even_case(replicas, stages, microbatches), memory=(2 * stages,) * stages, hands_over=False)
    workers = frozenset(case.worker(7 * one % replicas, (3 * one + 1) % stages) for one in range(lost))
    plan = check(replace(case, lost=workers))
    assert plan is not None
    assert plan.period <= most * plan.bound.value


def test_more_time_gives_no_longer_a_period() -> None:
    case = replace(even_case(12, 4, 16), memory=(8,) * 4, hands_over=False, lost=frozenset({6}))
    first, best = plan_large(case), plan_large(case, budget=2.0)
    assert first is not None and best is not None
    assert best.period <= first.period


def test_a_healthy_job_is_planned_as_one_replica() -> None:
    case = even_case(5, 3, 8)
    plan = plan_large(case)
    assert plan is not None
    program = plan.program()
    verify(program)
    assert plan.period == simulate(program, case).period == simulate(plan_job(case), case).period


def test_other_cases_are_left_to_the_search() -> None:
    case = even_case(8, 3, 8)
    assert plan_large(replace(case, slow={3: 2.0})) is None
    assert plan_large(replace(case, ports={3: 0.5})) is None
    assert plan_large(replace(case, links={(0, 1): WorkerLink(1.0, 0.0)})) is None
    assert plan_large(replace(case, lost=frozenset(range(0, 15, 3)))) is None, "most replicas have lost workers"
    assert plan_large(replace(case, lost=frozenset({1}))) is not None


@pytest.mark.parametrize("row", [Row(+1, (Kind.F,), -1), Row(0, (Kind.I,), -2)], ids=["next stage", "two in flight"])
def test_who_inserts_goes_by_the_table_of_needs(monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    """With one need more of each F, steps take longer, and what the plan says of them still holds."""
    late = Case(CostModel.uniform(3, 1, 1, 1, latency=5), 6, (0, 1, 2)).of_replicas(4, 1, 1)
    case = replace(late, lost=frozenset({late.worker(1, 0), late.worker(1, 1)}))
    free = check(case)
    monkeypatch.setitem(RULE, Kind.F, (*RULE[Kind.F], row))
    held_up = check(case)
    assert free is not None and held_up is not None
    assert held_up.period > free.period
