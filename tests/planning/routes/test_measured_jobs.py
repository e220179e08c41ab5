"""The case of a job from the costs that its replicas measure: who counts as slow, and which links are whose."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured import noisy, seconds_of_updates

from adaptra.errors import CaseError
from adaptra.planning.routes.measured_jobs import NOISE, measured_case, pipeline_case
from adaptra.program.placement import v_shaped
from adaptra.simulation.case import Case, WorkerLink
from adaptra.simulation.cost import CostModel
from adaptra.sizes import MemoryLimit

PIPELINE = CostModel.uniform(3, 0.04, 0.05, 0.03, 0.004, 0.01)


def narrow(*edges: tuple[int, int]) -> CostModel:
    return PIPELINE.with_occupancies(edges, 24)


def measured(*costs: CostModel, crossing: dict[tuple[int, int], WorkerLink] | None = None) -> Case:
    return measured_case(costs, 4, seconds_of_updates(3), crossing=crossing)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100_000), st.integers(2, 6), st.floats(0.0, 0.02))
def test_noise_is_no_difference(seed: int, replicas: int, noise: float) -> None:
    chance = random.Random(seed)
    case = measured(*(noisy(PIPELINE, chance, noise) for _ in range(replicas)))
    assert not case.slow
    assert not case.links
    assert case.cost.forward == pytest.approx(PIPELINE.forward, rel=noise)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100_000), st.integers(2, 5), st.integers(1, 4), st.sampled_from([1.3, 2.0, 3.7]))
def test_slow_workers_are_found_as_long_as_one_is_healthy(seed: int, replicas: int, slow: int, factor: float) -> None:
    chance = random.Random(seed)
    hurt = sorted(chance.sample(range(replicas), min(slow, replicas - 1)))
    times = (factor * 0.04, factor * 0.05, factor * 0.03)
    costs = [PIPELINE.with_stage(1, *times) if replica in hurt else PIPELINE for replica in range(replicas)]
    case = measured(*(noisy(cost, chance, 0.01) for cost in costs))
    assert sorted(case.slow) == [case.worker(replica, 1) for replica in hurt]
    assert all(found == pytest.approx(factor, rel=NOISE) for found in case.slow.values())
    assert all(abs(found / NOISE - round(found / NOISE)) < 1e-6 for found in case.slow.values())


def test_a_stage_that_is_slow_in_all_replicas_is_slow_for_all() -> None:
    slow = PIPELINE.with_stage(1, 0.08, 0.1, 0.06)
    case = measured(slow, slow)
    assert (case.slow, case.cost.forward) == ({}, (0.04, 0.08, 0.04))


def test_a_link_that_differs_is_one_of_its_two_workers() -> None:
    case = measured(PIPELINE, narrow((0, 1)).with_latency(2, 1, 0.5), PIPELINE)
    assert case.links == {(3, 4): WorkerLink(0.004, 0.24), (5, 4): WorkerLink(0.5, 0.01)}
    assert case.link(3, 1, (0, 1)) == WorkerLink(0.004, 0.01), "never measured, so as those of all"


def test_the_links_of_one_healthy_replica_of_four_are_shared() -> None:
    hurt = narrow((1, 2), (2, 1))
    case = measured(hurt, hurt, PIPELINE, hurt)
    assert sorted(case.links) == [(1, 2), (2, 1), (4, 5), (5, 4), (10, 11), (11, 10)]
    assert case.cost.occupancy_forward == PIPELINE.occupancy_forward


def test_a_worker_whose_links_are_all_narrow_has_narrow_links_to_other_replicas_until_they_are_measured() -> None:
    hurt = narrow((0, 1), (1, 0), (1, 2), (2, 1))
    case = measured(PIPELINE, hurt)
    assert case.links[4, 2] == case.links[0, 4] == WorkerLink(0.004, 0.24)
    assert (3, 1) not in case.links, "worker 3 has one link, which the port of worker 4 explains"
    crossing = {(4, 2): WorkerLink(0.004, 0.01), (0, 4): WorkerLink(0.004, 0.1)}
    case = measured(PIPELINE, hurt, crossing=crossing)
    assert (4, 2) not in case.links
    assert case.links[0, 4] == crossing[0, 4]


def test_a_worker_with_two_stages_has_one_factor() -> None:
    pipeline = CostModel.uniform(4, 0.04, 0.04, 0.04)
    hurt = pipeline.with_stage(0, 0.08, 0.08, 0.08).with_stage(3, 0.08, 0.08, 0.08)
    case = measured_case([pipeline, hurt], 4, seconds_of_updates(4), placement=v_shaped(2))
    assert case.slow == {2: 2.0}


@pytest.mark.parametrize("replica", [0, 1])
def test_the_case_of_a_replica_has_its_own_costs(replica: int) -> None:
    hurt = narrow((0, 1)).with_stage(2, 0.08, 0.1, 0.06)
    costs = (PIPELINE, hurt)
    case = replace(measured(*costs), memory=(3, 2, 1))
    found = pipeline_case(case, replica).cost
    for name in ("forward", "input_grad", "weight_grad", "latency_forward", "occupancy_forward", "occupancy_backward"):
        assert getattr(found, name) == pytest.approx(getattr(costs[replica], name))
    assert found.memory_limit == MemoryLimit((3.0, 2.0, 1.0))


def test_costs_of_different_pipelines_are_refused() -> None:
    with pytest.raises(CaseError, match=r"^measured_case: no costs: expected one cost model per replica$"):
        measured()
    with pytest.raises(CaseError, match=r"^measured_case: replica 1 has 2 stages: expected 3, as replica 0$"):
        measured(PIPELINE, CostModel.uniform(2, 1, 1, 1))
