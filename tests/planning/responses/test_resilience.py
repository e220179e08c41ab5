"""Resilience: losses by number, their decisions and throughput, and the plans that stand for several numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import even_case

from adaptra.errors import CaseError
from adaptra.planning.responses.availability import MtbfOf, random_trace, throughput_over
from adaptra.planning.responses.normalize import losses, normalized
from adaptra.planning.responses.resilience import Resilience, with_losses
from adaptra.planning.responses.responses import ResponsePrices


def job(replicas: int = 3, stages: int = 4, microbatches: int = 6) -> Resilience:
    return Resilience(even_case(replicas, stages, microbatches, 3.0), ResponsePrices(), effort=60_000)


@pytest.mark.parametrize("number", range(9))
def test_losses_lie_where_they_cost_least(number: int) -> None:
    case = even_case(3, 4, 6)
    found = with_losses(case, number)
    assert len(found.lost) == number
    assert losses(found) == normalized(case, number)


def test_losses_spread_over_replicas() -> None:
    found = with_losses(even_case(8, 4, 6), 8)
    assert {worker // 4 for worker in found.lost} == set(range(8))


def test_rows_hold_the_bounds_beside_each_period() -> None:
    rows = list(job().rows(2))
    assert [row["work_bound"] for row in rows] == [21, 30, 30]
    assert [row["healthy_period"] for row in rows] == [22, 22, 22]
    assert [row["fault_scaled_period"] for row in rows] == pytest.approx([22, 24, 26.4])
    assert rows[0]["decision"] == "keep the plan"
    assert all(22 <= row["period"] <= 30 for row in rows)
    assert all(row["of_limit"] == row["fault_scaled_period"] / row["period"] for row in rows)


def test_throughput_falls_to_nothing_when_a_stage_has_no_worker() -> None:
    found = job(2, 2, 4)
    assert found.throughput(0) == 1.0
    assert 0 < found.throughput(2) < 1
    assert found.throughput(3) == 0.0
    with pytest.raises(CaseError, match=r"^3 lost workers: expected 0\.\.2, so that a worker lives on each of 2 stages$"):
        found.decision(3)


def test_a_decision_is_made_once() -> None:
    found = job()
    assert found.decision(1) is found.decision(1)


def test_of_thousands_of_workers_the_plan_for_up_to_twice_as_many_stands_for_a_number() -> None:
    found = job(600, 4, 4)
    assert found.decision(3) is found.decision(4)
    assert len(found.decision(3).case.lost) == 4
    assert len({id(found.decision(number)) for number in range(5)}) == 4


def test_throughput_over_a_random_trace_is_between_the_worst_level_and_the_healthy_one() -> None:
    found = job()
    trace = random_trace(12, 2.0, 7200.0, MtbfOf.JOB, 3600.0, seed=1)
    levels = trace.levels()
    over = throughput_over(levels, trace.end, lambda live: found.throughput(12 - live))
    assert {level.workers for level in levels} > {12}
    assert min(found.throughput(12 - level.workers) for level in levels) < over.average < 1


def test_harm_to_the_given_case_does_not_count_twice() -> None:
    case = even_case(3, 4, 6, 3.0)
    assert with_losses(replace(case, lost=frozenset({0, 5})), 1) == with_losses(case, 1)
