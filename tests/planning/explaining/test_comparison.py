"""Comparing schedules and sweeping a delay: the figures are the simulator's, and the picture shows them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import even_case

from adaptra.errors import CaseError, MissingExtraError, PlanError, ScheduleError
from adaptra.planning.explaining.comparison import KEPT, SWEPT, compare, sweep_delay
from adaptra.planning.planner import plan
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.period_bound import period_bound
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.program.schedules import PLACED, generate
from adaptra.report.sweep import draw_sweep
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import lower_bound, simulate

CASE = Case(CostModel.uniform(4, 10, 10, 10, latency=2), 8, (0, 1, 2, 3), "four")
BOTH = [(1, 2), (2, 1)]
ONE_STAGE = [name for name in SWEPT if name not in PLACED]


def test_a_comparison_keeps_the_order_and_names_each_schedule_once() -> None:
    found = compare(CASE, ["zb_h2", "adapted", "zb_h2", "1f1b"], PERIOD.plan(CASE))
    assert [run.program.name for run in found.runs] == ["zb_h2", "adapted", "1f1b"]
    assert found.runs[2].makespan == simulate(generate("1f1b", 4, 8), CASE.cost).makespan
    assert found.counts_periods and found.bound == PERIOD.binds(CASE)
    assert found.runs[1].period <= found.runs[0].period


def test_behind_a_barrier_the_makespan_counts() -> None:
    found = compare(replace(CASE, barrier=True), ["adapted"], plan(CASE))
    assert not found.counts_periods and found.bound.value == lower_bound(CASE).value
    assert found.of_bound(found.runs[0]) == found.runs[0].makespan / found.bound.value
    swept = sweep_delay(replace(CASE, barrier=True), BOTH, [0], ["adapted"])
    assert swept.to_json()["makespans"] == {"adapted": [found.runs[0].makespan]} and swept.bounds == (found.bound.value,)


def test_a_given_plan_is_not_planned_again() -> None:
    given = replace(generate("gpipe", 4, 8), name="adapted")
    (run,) = compare(CASE, ["adapted"], given).runs
    assert run.program is given


def test_ways_to_share_microbatches_are_compared_by_the_period_and_its_bound() -> None:
    case = replace(even_case(3, 4, 6, 3.0), slow={6: 2.0})
    adapted = plan_job(case)
    found = compare(case, ["kept", "healthy", "kept", "adapted"], adapted)
    assert [run.program.name for run in found.runs] == ["kept", "healthy", "adapted"]
    kept, healthy, planned = found.runs
    assert (kept.period, healthy.period, planned.period) == (42, 22, simulate(adapted, case).period)
    assert found.bound == period_bound(case, adapted.routing)
    assert found.of_bound(kept) == 42 / found.bound.value
    assert found.of_bound(healthy) is None, "it has faster workers than those that the bound is of"
    lost = replace(even_case(3, 4, 6, 3.0), lost=frozenset({6}))
    (around,) = compare(lost, ["adapted"], plan_job(lost)).runs
    work = 3 * 4 * 6 * 3 + 11 * 3  # the ops of all microbatches, and the optimizers of the workers that live
    assert around.bubble_ratio == pytest.approx(1 - work / (11 * around.makespan)), "a lost worker does not idle"
    with pytest.raises(PlanError, match=r"^schedule '1f1b': expected some of healthy, kept, blocks, turns, adapted$"):
        compare(case, ["1f1b"], adapted)


def test_a_sweep_adds_to_the_latency_and_plans_anew_but_for_the_plan_kept() -> None:
    found = sweep_delay(CASE, BOTH, [40, 0], ONE_STAGE)
    assert found.delays == (0, 40)
    slowed = CASE.cost.with_latency(1, 2, 42).with_latency(2, 1, 42)
    kept = PERIOD.plan(CASE)
    assert found.times[KEPT] == (PERIOD.of(kept, CASE.cost), PERIOD.of(kept, slowed))
    assert found.times["zb_h1"][1] == PERIOD.of(generate("zb_h1", 4, 8), slowed)
    assert found.times["adapted"][1] == PERIOD.of(PERIOD.plan(replace(CASE, cost=slowed)), slowed)
    assert found.bounds[1] == PERIOD.bound(replace(CASE, cost=slowed))
    assert found.to_json()["periods"]["adapted"] == list(found.times["adapted"])
    for name in ONE_STAGE:
        assert found.times["adapted"][1] <= found.times[name][1]


def test_what_is_over_memory_is_said_at_every_delay() -> None:
    found = sweep_delay(replace(CASE, cost=CASE.cost.limited((4.0,) * 4)), BOTH, [0, 9], ["zb_h2", "adapted"])
    assert found.over_memory == {"zb_h2": (True, True), "adapted": (False, False)}


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r"^schedule 'kept': expected some of gpipe, 1f1b, zb_h1, zb_h2, interleaved, zbv, paper, adapted$"
    ):
        compare(CASE, ["kept"], generate("gpipe", 4, 8))
    with pytest.raises(PlanError, match=r"^no schedule to compare: expected some of"):
        compare(CASE, [], generate("gpipe", 4, 8))
    with pytest.raises(PlanError, match=r"^no delays: expected at least one$"):
        sweep_delay(CASE, BOTH, [])
    with pytest.raises(CaseError, match=r"^edge 3→4: expected two neighbouring stages of 0..3$"):
        sweep_delay(CASE, [(3, 4)], [1])
    with pytest.raises(CaseError, match=r"is -1.0: expected a finite number that is not negative$"):
        sweep_delay(CASE, BOTH, [-3])
    with pytest.raises(ScheduleError, match=r"^placement 0,1,0,1: 1f1b places stages on ranks 0,1,2,3$"):
        compare(replace(CASE, placement=(0, 1, 0, 1), name="two"), ["1f1b"], generate("gpipe", 4, 8))


def test_the_picture_names_every_schedule_and_what_is_over_memory(tmp_path: Path) -> None:
    limited = replace(CASE, cost=CASE.cost.limited((4.0,) * 4))
    found = sweep_delay(limited, BOTH, [0, 20, 40], ["1f1b", "zb_h2", "kept", "adapted"])
    draw_sweep(found, tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    for text in ("1f1b<", "zb_h2 (over memory)<", "kept<", "adaptra, re-planned<", "between stages 1⇄2", "four: 4 stages"):
        assert text in drawn, text
    draw_sweep(found, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == drawn, "the same sweep gives the same file"
    draw_sweep(sweep_delay(CASE, [(1, 2)], [0, 20], ["1f1b"]), tmp_path / "c.png", title="one way")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sweep_delay(CASE, BOTH, [0, 20], ["1f1b"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match="pip install 'adaptra"):
        draw_sweep(found, tmp_path / "a.svg")
