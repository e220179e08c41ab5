"""Plans of several replicas in named situations: letter by letter what they were, legal, and with the period stated here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from jobs import even_case

from adaptra.passes.insert_comm import InsertComm
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.period_bound import period_bound
from adaptra.program.placement import in_turn, v_shaped
from adaptra.program.verify import verify
from adaptra.simulation.case import Case, WorkerLink
from adaptra.simulation.simulate import simulate


def even(replicas: int, stages: int, microbatches: int, optimizer: float = 3.0) -> Case:
    return replace(even_case(replicas, stages, microbatches, optimizer), memory=(2 * stages,) * stages)


PUBLISHED = even(3, 4, 6)
"""ReCycle's example, healthy."""
NARROW = WorkerLink(0.0, 6.0)

SITUATIONS = {
    "healthy": (PUBLISHED, 22.0),
    "lost": (replace(PUBLISHED, lost=frozenset({6})), 30.0),
    "two_lost": (replace(PUBLISHED, lost=frozenset({1, 6})), 30.0),
    "two_lost_of_one_stage": (replace(PUBLISHED, lost=frozenset({2, 6})), 57.0),
    "slow": (replace(even(4, 2, 4, 0.0), slow={3: 2.0}), 15.0),
    "lost_and_slow": (replace(even(4, 2, 4, 1.0), lost=frozenset({0}), slow={3: 1.5}), 19.0),
    "lost_behind_a_late_link": (replace(even(3, 2, 4), lost=frozenset({3}), links={(0, 1): WorkerLink(2.0)}), 21.0),
    "contributions": (replace(PUBLISHED, lost=frozenset({6}), hands_over=False), 30.0),
    "barrier": (replace(PUBLISHED, barrier=True), 24.0),
    "lost_barrier": (replace(PUBLISHED, lost=frozenset({6}), barrier=True), 32.0),
    "v": (replace(even_case(2, 4, 4, 1.0), placement=v_shaped(2), memory=(4, 4)), 26.0),
    "lost_v": (replace(even_case(3, 4, 4, 1.0), placement=v_shaped(2), lost=frozenset({3})), 38.0),
    "lost_v_barrier": (replace(even_case(3, 4, 4, 1.0), placement=v_shaped(2), lost=frozenset({3}), barrier=True), 39.0),
    "lost_interleaved": (replace(even_case(3, 4, 4, 1.0), placement=in_turn(2, 2), lost=frozenset({2})), 38.0),
    # The two edges of a V between two workers share their link: 4 microbatches would occupy it for 4 · 2 · 6 = 48.
    "detour_v": (replace(even_case(2, 4, 4), placement=v_shaped(2), links={(0, 1): NARROW, (1, 0): NARROW}), 24.0),
    "detour": (replace(even_case(2, 2, 4), links={(0, 1): NARROW, (1, 0): NARROW}), 12.0),
}
"""Cases and the periods of their plans."""


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_plan_is_what_it_was(name: str, golden: Callable[[str, str], None]) -> None:
    case, period = SITUATIONS[name]
    program = plan_job(case, effort=200_000)
    golden(f"job_{name}.sched", str(program))
    verify(program, hands_over=case.hands_over, barrier=case.barrier)
    simulated = simulate(program, case)
    assert simulated.period == period
    assert simulated.period >= period_bound(case, program.routing).value
    assert not simulated.over_memory


@pytest.mark.parametrize("name", ["lost", "contributions", "lost_v"])
def test_each_lowered_plan_is_what_it_was(name: str, golden: Callable[[str, str], None]) -> None:
    case, period = SITUATIONS[name]
    insert = InsertComm("late", fold="handover" if case.hands_over else "contributions")
    lowered = insert.apply(plan_job(case, effort=200_000), case.cost)
    golden(f"job_{name}_lowered.sched", str(lowered))
    verify(lowered, hands_over=case.hands_over)
    assert simulate(lowered, case).period == period
