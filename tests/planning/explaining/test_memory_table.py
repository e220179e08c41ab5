"""What an explanation says of the period, of the makespan, and of less and more memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adaptra.planning.explaining.explanation import explain
from adaptra.planning.explaining.memory_table import time_by_memory
from adaptra.planning.least_memory import plan_least_memory
from adaptra.planning.planner import plan
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.planning.timing import MAKESPAN, StepTiming
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

LATE = Case(CostModel.uniform(4, 1, 1, 1, latency=1), 16, (0, 1, 2, 3))


def limited(most: float) -> Case:
    return replace(LATE, cost=LATE.cost.limited((most,) * 4))


@pytest.mark.parametrize("timing", [PERIOD, MAKESPAN], ids=lambda timing: timing.name)
def test_more_memory_brings_shorter_steps_and_each_point_is_a_plan(timing: StepTiming) -> None:
    case = limited(7.0)
    points = time_by_memory(case, plan_least_memory(case, timing=timing), timing)
    assert [point.held for point in points] == sorted({point.held for point in points})
    assert [point.time for point in points] == sorted({point.time for point in points}, reverse=True)
    (own,) = (point for point in points if point.is_own)
    assert (own.held, own.time) == (7, 54) and not own.is_over
    for point in points:
        assert point.is_over == (point.held > 7)
        assert timing.of(timing.plan(limited(point.held)), LATE.cost) <= point.time
        assert point.time >= timing.bound(limited(point.held))
    if timing is PERIOD:
        assert points[-1].time == 48, "with twice the memory no rank idles"


def test_a_plan_that_is_not_good_stays_in_the_table() -> None:
    case = Case(CostModel.uniform(4, 1, 1, 1), 16, (0, 1, 2, 3))
    points = time_by_memory(case, plan(case), PERIOD)
    (own,) = (point for point in points if point.is_own)
    assert own.time == 48 and any(point.held < own.held and point.time == 48 for point in points)


def test_of_a_large_program_there_is_no_table() -> None:
    case = Case(CostModel.uniform(32, 1, 1, 1), 256, tuple(range(32)))
    assert len(time_by_memory(case, plan(case, budget=1e-9), PERIOD)) == 1


def test_an_explanation_says_both_times_with_their_bounds_and_idle_time() -> None:
    explanation = explain(plan(LATE), LATE)
    found = explanation.to_json()
    assert (found["period"], found["period_bound"], found["makespan"], found["busy"]) == (54, 48, 54, 48)
    text = explanation.text(equations=False)
    assert "makespan 54, no plan beats 54 (load, rank 3), gap 0.0 %" in text
    assert "steps in a row: period 54, no plan beats 48 (work, rank 0), gap 12.5 %" in text
    assert "the busiest rank computes for 48: it idles for 6 of the period, 6 of the makespan" in text
    assert "limited by the load of rank 0, which alone would allow 12.5 % less; planning again saves 11.1 %" in text
    assert "period for the most memory that a rank holds; * is this plan:\n  memory " in text
    best = explain(PERIOD.plan(LATE), LATE)
    assert "it idles for 0 of the period, 6 of the makespan" in str(best)
    found = best.to_json()
    assert (found["period"], found["period_bound"], found["counts"]) == (48, 48, "period")
    assert any(point["is_own"] for point in found["by_memory"])


def test_behind_a_barrier_the_makespan_counts() -> None:
    explanation = explain(plan(LATE), replace(LATE, barrier=True))
    found = explanation.to_json()
    assert found["counts"] == "makespan" and found["limitation"]["above"] == pytest.approx(0.0)
    assert "makespan for the most memory that a rank holds" in str(explanation)
    assert found["by_memory"][-1]["time"] == 54
