"""Explanations of plans of several replicas: the figures, what binds, and remarks that planning again confirms."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import even_case, random_case, random_job_program

from adaptra.equations.replicas import replica_equations
from adaptra.planning.explaining.explanation import Explanation, explain
from adaptra.planning.routes.job_planner import plan_job
from adaptra.simulation.case import Case, WorkerLink
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

LOST = replace(even_case(3, 4, 6, 3.0), lost=frozenset({6}))
TWO_LOST = replace(even_case(3, 4, 6, 3.0), lost=frozenset({6, 10}))
SLOW = replace(even_case(4, 4, 8), slow={6: 2.0}, memory=(3, 3, 3, 3))
NARROW = replace(even_case(2, 2, 16), links={(0, 1): WorkerLink(0.0, 6.0)})
COUNTER = Case(CostModel.uniform(6, 2, 2, 1), 4, name="counter-example", replicas=2, lost=frozenset({0, 8, 11}))


def explained(case: Case) -> Explanation:
    return explain(plan_job(case), case)


def values_of(explanation: Explanation, title: str) -> dict[str, float | bool]:
    return {line.where: line.result for line in explanation.lines if line.equation.title == title}


def test_the_published_example_has_the_published_figures() -> None:
    found = explained(LOST)
    names = ("period", "healthy_period", "fault_scaled_period", "bound", "gap")
    assert [found.figures[name] for name in names] == [30, 22, 24, 30, 0]
    assert values_of(found, "healthy period of 1F1B") == {"any stage": 30}
    assert values_of(found, "fit: no overhead over 1F1B") == {"stage 2": True}
    assert values_of(found, "work of stage i") == {"stage 0": 21, "stage 1": 21, "stage 2": 30, "stage 3": 21}
    assert values_of(found, "lost workers that stage i bears within this period") == {f"stage {i}": 1 for i in range(4)}
    text = str(found)
    assert "    stage 2: ceiling(6*1/(3 - 1)) <= 4 - 1  holds\n" in text
    assert "bound: worker 2 of stage 2 computes 9 microbatches, 3 of other replicas\n" in text
    assert "\n  f    lost workers of stage i\n" in text and "\n  b    " not in text


def test_text_says_once_what_is_alike() -> None:
    many = str(explained(replace(even_case(2, 7, 3), lost=frozenset({3}))))
    assert "    stage 0, stage 1, stage 2, 3 more: 0 + 0 + (3 + ceiling(3*0/(2 - 0)))*(1 + 1 + 1) = 9\n" in many
    assert "    stage 0, stage 1, stage 3: 3 + 0 + (6 + ceiling(6*0/(3 - 0)))*(1 + 1 + 1) = 21\n" in str(explained(LOST))


def test_the_fit_holds_where_no_plan_is_as_short_as_1f1b() -> None:
    found = explained(COUNTER)
    assert found.simulation.period == 53
    assert values_of(found, "fit: no overhead over 1F1B") == {"stage 0": True, "stage 2": True, "stage 5": True}
    assert values_of(found, "healthy period of 1F1B") == {"any stage": 45}
    assert max(values_of(found, "work of stage i").values()) == 40
    (remark,) = (remark for remark in found.figures["remarks"] if remark.startswith("fit: "))
    assert remark == (
        "fit: it holds on every stage, and yet the period is above the 45 of the healthy 1F1B: it is necessary, not sufficient"
    )
    assert not any(remark.startswith("fit: ") for remark in explained(LOST).figures["remarks"])


def test_a_role_move_is_named_where_one_stage_lost_too_many() -> None:
    found = explained(TWO_LOST)
    assert found.simulation.period == 57
    (remark,) = (remark for remark in found.figures["remarks"] if remark.startswith("role move: "))
    assert remark == "role move: worker 7 to the place of 6; that would leave a work bound of 30 instead of 57"
    spread = replace(TWO_LOST, lost=frozenset({7, 10}))
    assert simulate(plan_job(spread), spread).period == 30
    assert not any(remark.startswith("role move: ") for remark in explained(LOST).figures["remarks"])


def test_a_recut_is_named_with_the_steps_until_it_pays() -> None:
    found = explained(TWO_LOST)
    best = values_of(found, "period that no re-cut beats")["all stages"]
    assert best == pytest.approx(6 * 3 * 12 / 10)
    assert values_of(found, "steps until a re-cut pays")["a re-cut that costs one period"] == pytest.approx(57 / (57 - best))
    assert (
        f"re-cut: fewer layers for stage 2 would take {best:.6g} at best; then it pays after its cost / 35.4 steps"
        in (found.figures["remarks"])
    )
    assert not any(remark.startswith("re-cut: ") for remark in explained(even_case(2, 4, 8)).figures["remarks"])


def test_missing_room_is_named_and_enough() -> None:
    found = explained(SLOW)
    (remark,) = (remark for remark in found.figures["remarks"] if remark.startswith("memory: "))
    named = re.fullmatch(r"memory: with room for (\d+) more microbatches on every worker the planner finds (\d+)", remark)
    assert named is not None
    assert SLOW.memory is not None
    more, period = map(int, named.groups())
    roomy = [replace(SLOW, memory=tuple(room + extra for room in SLOW.memory)) for extra in (more - 1, more)]
    less, enough = (simulate(plan_job(one), one).period for one in roomy)
    assert enough == period < less
    assert all(values_of(found, "memory limit").values())
    assert values_of(found, "microbatches that a worker keeps") == {"worker 6 of stage 2": pytest.approx(8 * 4 / 7)}


def test_detours_are_filled_with_the_plans_numbers() -> None:
    found = explained(NARROW)
    carried = sum(found.simulation.program.routing.holder(0, 1, microbatch) == 1 for microbatch in range(16))
    assert 0 < carried < 16
    assert values_of(found, "messages with b detours") == {"link 0→1, as planned": carried * 6}
    assert values_of(found, "best number of detours") == {"link 0→1": 16}


def test_a_link_that_binds_is_named_with_the_detours_that_would_help() -> None:
    # The healthy routes, as if nobody had planned a detour.
    healthy = even_case(2, 2, 16)
    case = replace(NARROW, cost=replace(NARROW.cost, occupancy_forward=(2.0,), occupancy_backward=(2.0,)))
    found = explain(plan_job(healthy), case)
    assert "beats 103 (link, link 0→1), " in found.summary[0], (
        "16 messages of 6, and what comes before the first and after the last"
    )
    (remark,) = found.figures["remarks"]
    assert remark == "detour: link 0→1 carries 16 messages; with 12 of 16 on detours the links would be busy for 24"
    alone = explain(plan_job(even_case(1, 2, 4)), replace(even_case(1, 2, 4), links={(0, 1): WorkerLink(0.0, 6.0)}))
    (remark,) = alone.figures["remarks"]
    assert remark == "link: link 0→1 carries 4 messages; no wider link leads to another replica's worker"


def test_a_port_that_binds_is_named() -> None:
    case = replace(even_case(1, 3, 4), ports={1: 3.0})
    (remark,) = explained(case).figures["remarks"]
    assert remark == "port: worker 1 sends for that long; fewer microbatches through it would help"


def test_an_explanation_as_json_is_plain_data() -> None:
    data = json.loads(json.dumps(explained(LOST).to_json()))
    assert (data["period"], data["bound"], data["bound_kind"], data["healthy_period"]) == (30, 30, "work", 22)
    assert {line["title"] for line in data["equations"]} >= {"work of stage i", "fit: no overhead over 1F1B"}
    assert set(data["symbols"]) >= {"P", "S", "M", "f"}


def test_a_step_that_takes_no_time_is_explained() -> None:
    nothing = replace(even_case(2, 2, 2), cost=CostModel.uniform(2, 0, 0, 0), lost=frozenset({0}))
    found = explained(nothing)
    assert (found.simulation.period, found.figures["gap"]) == (0, 0)
    assert replica_equations().bears not in {line.equation for line in found.lines}


@settings(max_examples=15)
@given(st.integers(0, 100_000))
def test_every_program_has_an_explanation(seed: int) -> None:
    case = random_case(seed, links=True)
    found = explain(random_job_program(case, seed), case)
    assert found.figures["bound"] <= found.simulation.period * (1 + 1e-9)
    assert "nan" not in str(found) and "inf" not in str(found)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["remarks"] == found.figures["remarks"]
