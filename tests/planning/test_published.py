"""The paper's rule: what it reaches where that is known, valid and within memory everywhere."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import CASES
from strategies import cases

from adaptra.errors import PlanError
from adaptra.planning.published import paper_rule, uniform_slack
from adaptra.program.verify import verify
from adaptra.simulation.case import Case
from adaptra.simulation.case_files import load_case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate
from adaptra.sizes import MemoryLimit


@pytest.mark.parametrize("name", ["A02", "A05", "B02", "C01", "D01", "D03", "E02", "G02", "G05", "G08", "J02"])
def test_it_reaches_what_the_published_rule_is_known_to_reach(name: str) -> None:
    """Without a memory limit, and with one; a case without a limit knows the two as equal."""
    case, known = load_case(CASES / f"{name}.json"), json.loads((CASES / f"{name}.json").read_text())
    everywhere = known["baselines"] | known["baselines_over_memory"]
    without_limit = replace(case, cost=replace(case.cost, memory_limit=None))
    assert simulate(paper_rule(without_limit), case.cost).makespan == pytest.approx(everywhere["paper"])
    assert simulate(paper_rule(case), case.cost).makespan == pytest.approx(everywhere["paper_cap"])


def test_the_papers_healthy_pipeline_takes_390() -> None:
    case = Case(CostModel.uniform(4, 10, 10, 10), 12, (0, 1, 2, 3))
    assert simulate(paper_rule(case), case.cost).makespan == 390


@given(case=cases(), limit=st.integers(1, 4), data=st.data())
def test_valid_and_within_every_limit(case: Case, limit: int, data: st.DataObject) -> None:
    stages = case.cost.stages
    sizes = tuple(data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=stages, max_size=stages)))
    room = tuple(size * data.draw(st.integers(1, 4)) for size in sizes)
    cost = replace(
        case.cost, memory_forward=sizes, memory_input_grad=tuple(size / 2 for size in sizes), memory_limit=MemoryLimit(room)
    )
    limited = replace(case, cost=cost)
    for program in (paper_rule(limited, in_flight=limit), uniform_slack(limited, in_flight=limit)):
        verify(program)
        simulated = simulate(program, limited.cost)
        assert not simulated.over_memory
        assert max(simulated.peak_in_flight) <= limit


@pytest.mark.parametrize(
    ("memory", "in_flight"), [(10, (10, 7, 4, 1)), (7, (7, 5, 3, 1)), (5, (5, 3, 2, 1)), (1, (1, 1, 1, 1))]
)
def test_memory_becomes_slack_spread_evenly(memory: int, in_flight: tuple[int, ...]) -> None:
    case = Case(CostModel.uniform(4, 10, 10, 10), 12, (0, 1, 2, 3))
    assert simulate(uniform_slack(case, in_flight=memory), case.cost).peak_in_flight == in_flight


def test_a_single_stage_has_no_edge_to_spread_slack_over() -> None:
    verify(uniform_slack(Case(CostModel.uniform(1, 1, 1, 1), 3, (0,))))


def test_several_stages_on_a_rank_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^v: placement 0,1,0: expected one stage per rank"):
        paper_rule(Case(CostModel.uniform(3, 1, 1, 1), 2, (0, 1, 0), "v"))


def test_a_limit_below_one_microbatch_is_refused_by_rank() -> None:
    cost = CostModel.uniform(2, 1, 1, 1).limited((1.0, 0.5))
    with pytest.raises(PlanError, match=r"^memory limit of rank 1 is 0.5: one microbatch holds 1, the smallest that works$"):
        paper_rule(Case(cost, 2, (0, 1)))
