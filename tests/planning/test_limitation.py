"""What limits a plan: the cause is the bound's, and what would help really does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from strategies import cases

from adaptra.planning.limitation import Limitation, what_limits
from adaptra.planning.planner import plan
from adaptra.program.schedules import one_f_one_b
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

TEN = CostModel.uniform(4, 10, 10, 10)
ALONE = (0, 1, 2, 3)


def of(cost: CostModel, microbatches: int = 12) -> Limitation:
    return what_limits(simulate(plan(Case(cost, microbatches, ALONE)), cost))


def test_a_plan_at_the_bound_says_that_nothing_is_shorter() -> None:
    found = of(TEN)
    assert found.above == 0
    assert found.improvable == 0
    assert str(found).startswith("limited by the load of rank 3, and nothing is shorter; ")


def test_with_little_memory_another_microbatch_helps() -> None:
    slow = TEN.with_latency(1, 2, 30).with_latency(2, 1, 30)
    found = of(slow.limited((4.0, 4.0, 4.0, 4.0)))
    assert found.cause.startswith("the memory of stage ")
    memory = next(relief for relief in found.reliefs if "in flight" in relief.change)
    assert memory.saves > 0.05
    assert "one more microbatch in flight on " in str(found)
    assert f"would save {100 * memory.saves:.1f} %" in str(found)


def test_a_hidden_delay_costs_once_so_a_faster_edge_saves_half_of_it() -> None:
    cost = TEN.with_latency(1, 2, 60)
    found = of(cost)
    edge = next(relief for relief in found.reliefs if "edge 1→2 twice as fast" in relief.change)
    assert edge.saves == pytest.approx(30 / simulate(plan(Case(cost, 12, ALONE)), cost).makespan)


def test_the_stage_that_carries_the_load_helps_by_its_share() -> None:
    cost = replace(TEN, forward=(10.0, 30.0, 10.0, 10.0))
    found = of(cost)
    assert found.cause == "the load of rank 1"
    assert found.reliefs[0].change == "a stage 1 faster by a tenth"
    assert found.reliefs[0].saves > 0.08


def test_a_schedule_that_knows_no_delays_is_improvable() -> None:
    cost = TEN.with_latency(1, 2, 60)
    found = what_limits(simulate(one_f_one_b(4, 12), cost))
    assert found.improvable > 0.2
    assert "; planning again saves " in str(found)


def test_where_not_one_microbatch_fits_nothing_is_planned() -> None:
    found = what_limits(simulate(one_f_one_b(4, 12), TEN.limited((0.5, 4.0, 4.0, 4.0))))
    assert str(found) == "limited by the memory of stage 0, where not one microbatch fits"


@settings(deadline=None, max_examples=30)
@given(cases(max_stages=4, max_microbatches=4))
def test_no_relief_makes_anything_longer(case: Case) -> None:
    found = what_limits(simulate(plan(case, effort=20_000), case.cost))
    assert found.above >= -1e-9
    assert found.improvable >= 0
    assert all(relief.saves >= -1e-9 for relief in found.reliefs)
    assert json.loads(json.dumps(found.to_json()))["cause"] == found.cause
