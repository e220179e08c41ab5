"""The bubble equations against the paper's figures, against the simulator, and in the numbers they give for plans."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cases

from adaptra.equations.bubble import SYMBOLS, equations
from adaptra.equations.equation import Equation, legend
from adaptra.equations.warm_up import SlackRule, WarmUp, in_flight_limits, warm_up
from adaptra.errors import CaseError, PlanError
from adaptra.planning.explaining.explanation import explain
from adaptra.program.schedules import forward_only, generate, gpipe, one_f_one_b
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import lower_bound, simulate

TEN = CostModel.uniform(4, 10, 10, 10)


def short(found: WarmUp) -> tuple[int, ...]:
    """The edges with less slackness than they need."""
    return tuple(edge for edge, (slack, needed) in enumerate(zip(found.slack, found.needed, strict=True)) if slack < needed)


# ── the equations ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(*[st.floats(0.1, 100) for _ in range(6)])
def test_needed_slack_is_where_the_condition_turns(
    forward: float, back: float, there: float, home: float, forward_next: float, back_next: float
) -> None:
    model, values = equations(), (forward, back, there, home, forward_next, back_next)
    needed = model.needed_slack.evaluate(*values)
    assert model.no_cascade.evaluate(*values, needed * 1.001)
    assert not model.no_cascade.evaluate(*values, needed * 0.999)


def test_every_equation_takes_its_own_symbols_and_fills_them_in() -> None:
    model = equations()
    found = [getattr(model, name) for name in model.__slots__]
    assert all(isinstance(equation, Equation) for equation in found)
    for equation in found:
        assert {str(s) for s in equation.expression.free_symbols} == {str(s) for s in equation.arguments}, equation.title
        filled = equation.with_values(*range(2, 2 + len(equation.arguments)))
        assert "_" not in filled, filled


def test_values_stand_where_symbols_stood() -> None:
    equation = equations().no_cascade
    assert equation.text == "cB_i + cF_i + tB_i + tF_i <= Delta_i*(tB_{i+1} + tF_{i+1})"
    assert equation.with_values(1, 2, 3, 4, 5, 6, 7) == "4 + 3 + 2 + 1 <= 7*(6 + 5)"


def test_importing_does_not_import_sympy() -> None:
    modules = "adaptra.equations.bubble, adaptra.equations.warm_up, adaptra.planning.explaining.explanation, adaptra.passes"
    code = f"import sys, {modules}; sys.exit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ── warm-up ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_papers_healthy_warm_up() -> None:
    assert warm_up(TEN, 12).x == (7, 5, 3, 1)


def test_a_slow_edge_gets_the_slack_it_needs_and_no_other_does() -> None:
    found = warm_up(TEN.with_latency(1, 2, 60).with_latency(2, 1, 20), 24)
    assert found.needed == (1.0, 5.0, 1.0)
    assert found.slack == (2, 5, 2)
    assert found.x == (10, 8, 3, 1)
    assert short(found) == ()


def test_occupancy_counts_like_latency() -> None:
    assert warm_up(TEN.with_occupancy(1, 2, 60), 24).slack == warm_up(TEN.with_latency(1, 2, 60), 24).slack


def test_unequal_stages_need_slack_in_proportion() -> None:
    cost = replace(TEN, forward=(30.0, 10.0, 10.0, 10.0), input_grad=(30.0, 10.0, 10.0, 10.0))
    assert warm_up(cost, 24).needed == (3.0, 1.0, 1.0)


def test_a_budget_takes_slack_where_most_is_to_spare() -> None:
    found = warm_up(TEN.with_latency(0, 1, 40).with_latency(1, 0, 40), 24, in_flight_limit=7)
    assert found.x == (7, 3, 2, 1)


def test_a_tight_budget_leaves_edges_short() -> None:
    found = warm_up(TEN.with_latency(0, 1, 40), 24, in_flight_limit=(3, 3, 2, 1))
    assert found.x == (3, 2, 2, 1)
    assert short(found) == (0, 1)


@settings(max_examples=60)
@given(cases(max_stages=6, max_microbatches=40), st.data())
def test_warm_up_is_always_within_lemma_and_budget(case: Case, data: st.DataObject) -> None:
    stages = case.cost.stages
    limit = data.draw(st.none() | st.integers(1, 12) | st.lists(st.integers(1, 12), min_size=stages, max_size=stages))
    rule = data.draw(st.sampled_from(SlackRule))
    found = warm_up(case.cost, case.microbatches, limit, rule)
    model = equations()
    assert found.x[-1] == 1
    for stage, x in enumerate(found.x):
        assert model.budget.evaluate(x, found.limit[stage], case.microbatches)
        if stage:
            assert found.x[stage - 1] >= x
            assert model.slackness.evaluate(found.slack[stage - 1], found.x[stage - 1], x)


@settings(max_examples=40)
@given(cases(max_stages=6))
def test_with_room_enough_no_edge_is_short(case: Case) -> None:
    found = warm_up(case.cost, 4000)
    if all(needed < 500 for needed in found.needed):
        assert short(found) == ()


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (0, "in_flight: stage 0 may keep 0 microbatches in flight: the smallest limit that works is 1"),
        ([2, 0], "in_flight: stage 1 may keep 0 microbatches in flight: the smallest limit that works is 1"),
        ([2, 2, 2], "in_flight: expected one number or 2, one per stage, got 3"),
    ],
)
def test_impossible_limits_are_refused(memory: int | list[int], message: str) -> None:
    with pytest.raises(PlanError) as error:
        in_flight_limits(memory, 2, 4)
    assert str(error.value) == message


# ── explanations ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_explanation_shows_the_plans_numbers() -> None:
    cost = TEN.with_latency(1, 2, 30)
    explanation = explain(one_f_one_b(4, 12), cost)
    figures = explanation.to_json()
    assert figures["x"] == [4, 3, 2, 1]
    assert figures["slack"] == [1, 1, 1]
    assert figures["makespan"] == simulate(one_f_one_b(4, 12), cost).makespan
    assert figures["bound"] == lower_bound(Case(cost, 12, (0, 1, 2, 3))).value
    assert figures["gap"] == figures["makespan"] / figures["bound"] - 1
    text = str(explanation)
    assert "  this plan           4 3 2 1\n  the equations alone 8 6 3 1\n" in text
    assert "edge 1-2: 0 + 30 + 10 + 10 <= 1*(10 + 10)  DOES NOT HOLD" in text
    assert "edge 0-1: 0 + 0 + 10 + 10 <= 1*(10 + 10)  holds" in text
    assert "stage 0: 4 <= Min(12, 12)  holds" in text
    assert "; all times in the unit of the case\n" in text and "\n  h_i      earliest start of the first F on stage i\n" in text
    assert "gap 2" in text and "; all times in seconds\n" in str(explain(one_f_one_b(4, 12), cost, unit="seconds"))


def test_every_symbol_of_every_equation_is_explained() -> None:
    model = equations()
    found = [getattr(model, field.name) for field in dataclasses.fields(model)]
    assert set(legend(found, SYMBOLS)) == set(SYMBOLS)
    assert all(equation.symbols <= set(SYMBOLS) for equation in found)


def test_an_explanation_as_json_is_plain_data() -> None:
    explanation = explain(one_f_one_b(4, 12), TEN)
    data = json.loads(json.dumps(explanation.to_json()))
    assert data["x"] == [4, 3, 2, 1]
    assert data["makespan"] == explanation.simulation.makespan
    assert {line["where"] for line in data["equations"]} >= {"edge 0-1", "edge 2-3", "stage 0"}


@settings(max_examples=60)
@given(cases(), st.sampled_from(["gpipe", "1f1b", "zb_h1"]))
def test_bound_equations_never_exceed_the_makespan(case: Case, name: str) -> None:
    explanation = explain(generate(name, case.cost.stages, case.microbatches), case.cost)
    bounds = [line.result for line in explanation.lines if line.equation.source == "lower bound"]
    assert len(bounds) >= 4
    assert max(bounds) <= explanation.simulation.makespan * (1 + 1e-9)
    assert max(bounds) <= explanation.to_json()["bound"] * (1 + 1e-9)


def test_what_has_no_explanation() -> None:
    with pytest.raises(PlanError, match="forward_only computes no gradients: there is no warm-up to explain"):
        explain(forward_only(range(4), 3), TEN)
    with pytest.raises(CaseError, match="gpipe has 1 replicas of 4 stages and 3 microbatches: expected 1, 4 and 4"):
        explain(gpipe(4, 3), Case(TEN, 4))
