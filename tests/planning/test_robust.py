"""Robust plans: chosen by the simulator over all scenarios, never worse than a plan made for one, within every limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cost_models

from adaptra.errors import CaseError, PlanError
from adaptra.planning.planner import plan
from adaptra.planning.published import uniform_slack
from adaptra.planning.robust import Objective, robust_plan
from adaptra.program.schedules import one_f_one_b
from adaptra.program.verify import verify
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.scenarios import Scenario, delay_scenarios
from adaptra.simulation.simulate import simulate
from adaptra.sizes import MemoryLimit

BASE = CostModel.uniform(4, 10, 10, 10, latency=2).limited((8.0,) * 4)
CASE = Case(BASE, 16, (0, 1, 2, 3), "uncertain")
UNCERTAIN = delay_scenarios(BASE, {(1, 2): {0: 1, 40: 1}, (2, 1): {0: 1, 40: 1}})
QUICK = 20_000


def test_scenarios_are_all_combinations_of_delays_and_their_weights() -> None:
    found = delay_scenarios(BASE, {(0, 1): {0: 3, 5: 1}, (2, 1): {7: 2}})
    assert [scenario.weight for scenario in found] == [6, 2]
    assert found[1].cost == BASE.with_latency(0, 1, 7).with_latency(2, 1, 9)
    assert delay_scenarios(BASE, {}) == (Scenario(BASE),)


@pytest.mark.parametrize("objective", Objective)
def test_between_two_delays_no_plan_for_one_of_them_is_better(objective: Objective) -> None:
    """The plan for no delay pays for it many times over; the robust plan gives up little to be ready for it."""

    def judged(makespans: list[float]) -> float:
        return max(makespans) if objective is Objective.WORST else sum(makespans) / len(makespans)

    found = robust_plan(CASE, UNCERTAIN, objective=objective)
    assert found.times == tuple(simulate(found.program, scenario.cost).makespan for scenario in UNCERTAIN)
    assert (found.expected, found.worst) == (sum(found.times) / 4, max(found.times))
    for scenario in UNCERTAIN:
        alone = plan(replace(CASE, cost=scenario.cost))
        assert judged(list(found.times)) <= judged([simulate(alone, other.cost).makespan for other in UNCERTAIN])
    optimist = [simulate(plan(CASE), scenario.cost).makespan for scenario in UNCERTAIN]
    assert judged(optimist) > 1.15 * judged(list(found.times))


@pytest.mark.parametrize("memory", [5, 6, 8])
def test_each_objective_is_best_by_its_own_measure(memory: int) -> None:
    expected, worst = (robust_plan(CASE, UNCERTAIN, objective=objective, in_flight=memory) for objective in Objective)
    assert expected.expected <= worst.expected
    assert worst.worst <= expected.worst


def test_a_weight_moves_the_plan_towards_what_is_likely() -> None:
    rarely = delay_scenarios(BASE, {(1, 2): {0: 1000, 40: 1}, (2, 1): {0: 1000, 40: 1}})
    assert robust_plan(CASE, rarely).times[0] == simulate(plan(CASE), BASE).makespan


@settings(max_examples=25)
@given(data=st.data())
def test_valid_within_limits_not_below_the_bound_and_not_worse_than_the_incumbent(data: st.DataObject) -> None:
    stages, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    costs = [data.draw(cost_models(stages)) for _ in range(3)]
    limit = data.draw(st.integers(1, 3))
    case = Case(replace(costs[0], memory_limit=MemoryLimit((float(limit),) * stages)), microbatches, tuple(range(stages)))
    incumbent = one_f_one_b(stages, microbatches)
    scenarios = [Scenario(cost, data.draw(st.sampled_from([1.0, 2.5]))) for cost in costs]
    found = robust_plan(case, scenarios, in_flight=2, incumbent=incumbent, effort=QUICK)
    verify(found.program)
    run = simulate(found.program, case.cost)
    assert not run.over_memory
    assert max(run.peak_in_flight) <= 2
    for makespan, bound in zip(found.times, found.bounds, strict=True):
        assert makespan >= bound * (1 - 1e-9)
    before = simulate(incumbent, case.cost)
    if not before.over_memory and max(before.peak_in_flight) <= 2:
        weights = [scenario.weight for scenario in scenarios]
        times = [simulate(incumbent, cost).makespan for cost in costs]
        expected = sum(time * weight for time, weight in zip(times, weights, strict=True)) / sum(weights)
        assert found.expected <= expected * (1 + 1e-9)


def test_where_nothing_is_known_spare_memory_is_slack() -> None:
    """Any one of six directed edges may turn slow: even slack is better than a plan for the healthy pipeline."""
    edges = [(source, source + 1) for source in range(3)] + [(source + 1, source) for source in range(3)]
    scenarios = [Scenario(BASE.with_latency(*edge, 42.0)) for edge in edges]
    even = [simulate(uniform_slack(CASE), scenario.cost).makespan for scenario in scenarios]
    healthy = [simulate(plan(CASE), scenario.cost).makespan for scenario in scenarios]
    assert max(even) < max(healthy)
    assert robust_plan(CASE, scenarios, objective=Objective.WORST).worst <= max(even)


def test_ranks_with_several_stages_have_robust_plans_too() -> None:
    cost = CostModel.uniform(4, 2, 2, 2)
    scenarios = delay_scenarios(cost, {(1, 2): {0: 1, 9: 1}})
    found = robust_plan(Case(cost, 4, (0, 1, 1, 0)), scenarios, effort=QUICK)
    verify(found.program)
    assert found.program.placement == (0, 1, 1, 0)


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^uncertain: no scenarios: expected at least one$"):
        robust_plan(CASE, [])
    with pytest.raises(PlanError, match=r"^uncertain: scenario 0 has weight 0: expected a positive number$"):
        robust_plan(CASE, [Scenario(BASE, 0)])
    with pytest.raises(PlanError, match=r"^uncertain: scenario 1 has 3 stages: expected 4$"):
        robust_plan(CASE, [Scenario(BASE), Scenario(CostModel.uniform(3, 1, 1, 1))])
    with pytest.raises(PlanError, match=r"^delays 0→1: 0: expected at least one per edge and at most 4096 combinations$"):
        delay_scenarios(BASE, {(0, 1): {}})
    with pytest.raises(CaseError, match=r"^edge 3→4: expected two neighbouring stages of 0..3$"):
        delay_scenarios(BASE, {(3, 4): {1: 1}})
