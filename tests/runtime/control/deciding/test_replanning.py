"""Planning anew: what is proposed where no other order is better."""

from __future__ import annotations

from dataclasses import replace

from controller_world import HEALTHY, SLOW, SLOW_PROGRAM, plan_zero, predict

from adaptra.passes.insert_comm import InsertComm
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.detection.detector import Detection

PLANNING = Planning(lambda case, incumbent: incumbent, ahead_of_need=InsertComm("ahead").ahead_of_need)
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
