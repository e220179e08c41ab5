"""Planning anew: what is proposed where no other order is better."""

from __future__ import annotations

from dataclasses import replace

import pytest
from controller_world import CASE, HEALTHY, SLOW, SLOW_PROGRAM, plan_zero, predict

from adaptra.passes.insert_comm import InsertComm
from adaptra.planning.routes.joined_programs import join
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.runtime.control.deciding.replanning import Planning, step_seconds
from adaptra.runtime.detection.detector import Detection
from adaptra.simulation.scenarios import Scenario
from adaptra.simulation.simulate import lower_bound, simulate

PLANNING = Planning(lambda case, incumbent: incumbent, ahead_of_need=InsertComm("ahead").ahead_of_need)
OVERLAPPING = PERIOD.plan(CASE)
"""Steps of it in a row overlap."""

ADDED = SLOW.latency(1, 2) - HEALTHY.latency(1, 2)


def test_receives_are_posted_sooner_for_a_latency_that_stands_out_of_the_noise_of_steps() -> None:
    current, slow = plan_zero(SLOW_PROGRAM), Detection(12, (), SLOW)
    for noise in (0.0, 0.1 * ADDED):
        lowered = PLANNING.lowered_anew(current, replace(slow, noise=noise))
        assert lowered is not None and lowered.program == SLOW_PROGRAM and lowered.case.cost == SLOW
    assert PLANNING.lowered_anew(plan_zero(SLOW_PROGRAM), Detection(12, (), HEALTHY)) is None, "they are posted soon enough"


def test_the_same_order_is_not_proposed_again_for_what_noise_may_be() -> None:
    """A switch that gains nothing that steps could show is no switch to make: on busy cores there were 40 in 20,000 steps."""
    growth = predict(SLOW_PROGRAM, SLOW) - predict(SLOW_PROGRAM, HEALTHY)
    noise = 2 * max(ADDED, growth)
    assert PLANNING.lowered_anew(plan_zero(SLOW_PROGRAM), Detection(12, (), SLOW, noise=noise)) is None


def test_a_step_costs_its_period_or_its_makespan_behind_a_barrier() -> None:
    detection = Detection(12, (), HEALTHY)
    behind = replace(detection, barrier=True)
    assert PLANNING.expect(OVERLAPPING, detection) == simulate(OVERLAPPING, HEALTHY).period
    assert PLANNING.expect(OVERLAPPING, behind) == simulate(OVERLAPPING, HEALTHY).makespan
    assert simulate(OVERLAPPING, HEALTHY).period < 0.98 * simulate(OVERLAPPING, HEALTHY).makespan
    plan, _ = PLANNING.plan_for(behind, plan_zero(OVERLAPPING), (), False)
    assert plan.case.barrier and plan.predicted == simulate(OVERLAPPING, HEALTHY).makespan
    assert plan.bound == lower_bound(plan.case).value


def test_a_plan_that_uses_free_memory_of_the_devices_says_so() -> None:
    """A user who gave a limit knows how much there is, and a plan that takes no more says nothing."""
    peaks = {SLOW_PROGRAM: (800, 3000), OVERLAPPING: (1000, 4000)}
    said: dict[tuple[bool, bool], str] = {}
    for is_free in (True, False):
        for running, found in ((SLOW_PROGRAM, OVERLAPPING), (OVERLAPPING, SLOW_PROGRAM)):
            planning = Planning(lambda case, _, found=found: found, activation_bytes=peaks.__getitem__, fills_free=is_free)
            plan, _ = planning.plan_for(Detection(12, (), HEALTHY), plan_zero(running), (), False)
            said[is_free, found is OVERLAPPING] = plan.reason
    expected = "; the devices have room: activations of up to 3.9 KiB on rank 1 instead of 2.9 KiB"
    assert said.pop((True, True)).endswith(expected)
    assert len(said) == 3 and not any("room" in reason for reason in said.values())


def test_lossy_edges_count_by_the_mean_of_either() -> None:
    late = SLOW.with_latency(0, 1, 0.2)
    detection = Detection(12, (), SLOW, (Scenario(SLOW, 0.75), Scenario(late, 0.25)))
    for barrier in (False, True):
        times = [step_seconds(SLOW_PROGRAM, cost, barrier=barrier) for cost in (SLOW, late)]
        expected = PLANNING.expect(SLOW_PROGRAM, replace(detection, barrier=barrier))
        assert expected == pytest.approx(0.75 * times[0] + 0.25 * times[1])


def test_a_program_of_several_replicas_costs_its_period_either_way() -> None:
    program = join([OVERLAPPING] * 2)
    behind, free = (step_seconds(program, HEALTHY, barrier=barrier) for barrier in (True, False))
    assert behind == pytest.approx(simulate(OVERLAPPING, HEALTHY).makespan)
    assert free == pytest.approx(simulate(OVERLAPPING, HEALTHY).period)


def test_the_running_order_is_planned_for_a_barrier_that_came_or_went() -> None:
    behind = Detection(12, (), HEALTHY, barrier=True, barrier_is_new=True)
    found = PLANNING.lowered_anew(plan_zero(), behind)
    assert found is not None and found.program == plan_zero().program and found.case.barrier
    assert found.predicted == simulate(found.program, HEALTHY).makespan
    assert found.reason == "all ranks meet between steps; the same order"
    assert PLANNING.lowered_anew(found, replace(behind, barrier_is_new=False)) is None
    back = PLANNING.lowered_anew(found, Detection(20, (), HEALTHY, barrier_is_new=True))
    assert back is not None and back.predicted == plan_zero().predicted
