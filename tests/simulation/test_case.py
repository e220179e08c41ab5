"""Cases of one pipeline and of several replicas: their JSON form, what it refuses, and who takes which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import random_case

from adaptra.errors import CaseError
from adaptra.planning.planner import plan
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.period_bound import period_bound
from adaptra.planning.routes.steady_steps import pipeline_bound
from adaptra.program.routing import Routing
from adaptra.simulation.case import Case, WorkerLink
from adaptra.simulation.case_files import case_from_json, case_to_json
from adaptra.simulation.cost import Blocking, CostModel
from adaptra.simulation.simulate import lower_bound

SMALL: dict[str, Any] = {"P": 2, "S": 2, "M": 3, "t_f": 1, "t_i": [1, 2], "t_w": 0.5}


@given(st.integers(0, 10_000))
def test_a_case_comes_back_from_its_json(seed: int) -> None:
    case = random_case(seed, links=True, shapes=True)
    assert case_from_json(case_to_json(case)) == case


def test_the_fields_of_a_case() -> None:
    given_fields = {"lost": ["1.0"], "slow": {"0.1": 2, "0": 1.5}, "links": {"0-1": {"c": 2}}, "mem_cap": 4, "handover": 1}
    case = case_from_json(SMALL | given_fields)
    assert (case.replicas, case.stages, case.microbatches, case.workers) == (2, 2, 3, 4)
    assert (case.cost.forward, case.cost.input_grad, case.cost.weight_grad) == ((1.0, 1.0), (1.0, 2.0), (0.5, 0.5))
    assert (case.lost, case.slow) == (frozenset({2}), {1: 2.0, 0: 1.5})
    assert case.links == {(0, 1): WorkerLink(2.0, 0.0)}
    assert (case.memory, case.hand_over, case.hands_over) == ((4, 4), 1.0, True)


def test_workers_with_several_stages() -> None:
    several = {"S": 4, "t_i": 1, "placement": [[0, 3], [1, 2]], "lost": ["1.2"], "slow": {"0.3": 2}, "mem_cap": [4, 5]}
    case = case_from_json(SMALL | several)
    assert (case.ranks, case.workers, case.placement) == (2, 4, (0, 1, 1, 0))
    assert case.grid == ((0, 1, 1, 0), (2, None, None, 2))
    assert (case.lost, case.slow, case.memory) == (frozenset({3}), {0: 2.0}, (4, 5))
    assert [case.stages_of(worker) for worker in range(4)] == [(0, 3), (1, 2), (0, 3), (1, 2)]
    assert case_to_json(case)["lost"] == ["1.1"]


def test_a_link_within_a_worker_takes_no_time() -> None:
    links = {"0-1": {"c": 7, "o": 1}}
    case = case_from_json(SMALL | {"S": 4, "t_i": 1, "placement": [[0, 3], [1, 2]], "c": [1, 2, 3], "links": links})
    assert case.link(1, 1, (1, 2)) == WorkerLink()
    assert case.link(0, 1, (0, 1)) == case.link(0, 1, (3, 2)) == WorkerLink(7.0, 1.0)
    assert (case.link(1, 0, (1, 0)).latency, case.link(1, 0, (2, 3)).latency) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"P": None}, r"^field 'P': expected a whole number of at least 1, got None$"),
        ({"P": 0}, r"^field 'P': expected a whole number of at least 1, got 0$"),
        ({"P": 2_000_000}, r"^field 'P': expected at most 1000000, got 2000000$"),
        ({"P": 500_000, "M": 1}, r"^P, S: 1,000,000 workers: expected at most 100,000$"),
        ({"P": 1000, "S": 1000, "M": 1000}, r"^P, S, M: 1,000,000 stages × 1,000 microbatches are 3,000,000,000 ops"),
        ({"t_f": -1}, r"^field 't_f': expected a finite number that is not negative, got -1$"),
        ({"t_f": [1]}, r"^field 't_f': expected a number or a list of 2, got \[1\]$"),
        ({"t_f": "1"}, r"^field 't_f': expected a number or a list of 2, got '1'$"),
        ({"t_b": 1}, r"^unknown field 't_b': expected some of "),
        (
            {"lost": ["0.0", "1.0"]},
            r"^lost: all 2 workers of stage 0, 0 to 2: expected one that lives on each stage; only a checkpoint has its ",
        ),
        ({"lost": ["2.0"]}, r"^lost: worker 4 does not exist: expected 0\.\.3, replica · 2 \+ rank$"),
        ({"lost": ["0.2"]}, r"^lost: '0\.2': stage 2 does not exist: expected 0\.\.1$"),
        ({"lost": ["x"]}, r"^lost: 'x': expected a worker such as '1\.2' for stage 2 of replica 1, or its number$"),
        ({"lost": [1]}, r"^field 'lost': expected a list of strings, got \[1\]$"),
        ({"slow": {"1": 0}}, r"^slow: 0 for worker 1: expected a factor above 0, such as 2 for half the speed$"),
        ({"slow": {"1": -2}}, r"^field 'slow.1': expected a finite number that is not negative, got -2$"),
        ({"slow": {"9": 2}}, r"^slow: worker 9 does not exist: expected 0\.\.3"),
        ({"links": {"0": {}}}, r"^links: '0': expected two workers such as '1-2', from 1 to 2$"),
        ({"links": {"0-1": {"d": 1}}}, r"^links 0-1: unknown field 'd': expected some of c, o$"),
        ({"links": {"0-7": {}}}, r"^links: worker 7 does not exist"),
        ({"mem_cap": 0}, r"^mem_cap: 0: expected a whole number of microbatches, at least 1$"),
        ({"mem_cap": 1.5}, r"^mem_cap: 1\.5: expected a whole number of microbatches, at least 1$"),
        ({"fold": "left"}, r"^field 'fold': expected one of handover, contributions, got 'left'$"),
        ({"placement": [[0], [2]]}, r"^field 'placement': expected each of the stages 0\.\.1 once, got \[\[0\], \[2\]\]$"),
        ({"placement": [[0, 1]], "mem_cap": [1, 2]}, r"^field 'mem_cap': expected a number or a list of 1, got \[1, 2\]$"),
        ({"placement": [[0, 1]], "lost": ["2"]}, r"^lost: worker 2 does not exist: expected 0\.\.1, replica · 1 \+ rank$"),
        ({"placement": [[0, 1]], "lost": ["0.1", "1.0"]}, r"^lost: all 2 workers of stage 0, 0 to 1: expected one that lives"),
        ({"changing": [2]}, r"^changing: stage 2 does not exist: expected 0\.\.1$"),
        ({"at_home": [-1]}, r"^field 'at_home': expected a list of whole numbers of at least 0, got \[-1\]$"),
        (
            {"at_home": [1], "lost": ["1.1"]},
            r"^lost: worker 1\.1 has stage 1, which is in at_home: expected one whose microbatches others may compute$",
        ),
        ({"barrier": 1}, r"^field 'barrier': expected true or false, got 1$"),
        ({"version": 1}, r"^version 1: a case with replicas, P, has version 2$"),
    ],
)
def test_a_bad_case_is_refused_with_the_field_its_value_and_what_was_expected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        case_from_json(SMALL | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(CaseError, match=r"^missing field 't_w'$"):
        case_from_json({name: value for name, value in SMALL.items() if name != "t_w"})


ALONE = Case(CostModel.uniform(2, 1, 2, 3, latency=4).limited((3.0, 2.0)), 4, barrier=True)


def test_one_pipeline_is_a_case_of_one_replica_and_keeps_its_file() -> None:
    assert (ALONE.replicas, ALONE.workers, ALONE.is_one_pipeline) == (1, 2, True)
    fields = case_to_json(ALONE)["case"]
    assert (fields["version"], fields["mem_cap"]) == (1, [3.0, 2.0])
    assert case_from_json(case_to_json(ALONE)) == ALONE and {ALONE: 1}[case_from_json(case_to_json(ALONE))] == 1


def test_its_replicas_have_whole_microbatches_of_its_memory_and_its_barrier() -> None:
    job = ALONE.of_replicas(3, 0.5)
    assert (job.workers, job.memory, job.barrier, job.step) == (6, (3, 2), True, (0.5, 0.5))
    assert case_to_json(job)["version"] == 2
    assert not ALONE.of_replicas(1).is_one_pipeline  # it counts memory as the planner of jobs does


@pytest.mark.parametrize("ask", [plan, lower_bound, pipeline_bound], ids=lambda ask: ask.__name__)
@pytest.mark.parametrize(
    "change", [{"replicas": 2}, {"slow": {1: 2.0}}, {"lost": frozenset[int](), "step": (1.0, 0.0)}], ids=str
)
def test_what_plans_one_pipeline_refuses_more(ask: Callable[[Case], object], change: dict[str, Any]) -> None:
    case = replace(ALONE, **change)
    with pytest.raises(CaseError, match=f": case has {case.replicas} replicas or workers of their own: expected one pipeline$"):
        ask(case)


@pytest.mark.parametrize("change", [{"half_duplex": True}, {"blocking": Blocking.SEND}], ids=str)
def test_what_plans_jobs_refuses_communication_that_it_does_not_know(change: dict[str, Any]) -> None:
    case = Case(replace(ALONE.cost, **change), 4)
    message = "^case: duplex or blocking_comm: expected neither with several replicas$"
    routing = Routing.at_home(case.placement, 1, case.microbatches)
    for ask in (lambda: case.of_replicas(2), lambda: replace(case, replicas=2), lambda: period_bound(case, routing)):
        with pytest.raises(CaseError, match=message):
            ask()
    with pytest.raises(CaseError, match=message):
        plan_job(case, effort=1000, routing=routing)
