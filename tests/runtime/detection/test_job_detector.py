"""Tests of the detector of a job: what it finds in one replica names that replica, and the others keep their costs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from job_world import COST, REPLICAS, STAGES, measured, slow

from adaptra.runtime.detection.changes import EdgeChange, StageChange
from adaptra.runtime.detection.detector import Detection
from adaptra.runtime.detection.job_detector import JobDetector, largest
from adaptra.runtime.measuring.measurement import ReduceTimes
from adaptra.simulation.cost import CostModel


def detections(costs: dict[int, CostModel], steps: int = 12, onset: int = 6) -> tuple[JobDetector, list[Detection]]:
    """What a detector finds when the costs of replicas change at a step."""
    detector = JobDetector(COST, REPLICAS, STAGES)
    found = [detector.observe(measured(step, costs if step >= onset else None)) for step in range(steps)]
    return detector, [one for one in found if one is not None]


def test_a_slow_worker_is_named_and_the_other_replica_keeps_its_costs() -> None:
    detector, (calibrated, changed) = detections({1: slow(1, 2.0)})
    assert calibrated.changes == () and calibrated.by_replica[0] == calibrated.by_replica[1]
    (change,) = changed.changes
    assert isinstance(change, StageChange) and (change.replica, change.where) == (1, (1, 1))
    assert str(change) == "worker 1.1 slow: 2.00x the calibrated time"
    assert changed.by_replica[0] == calibrated.by_replica[0]
    assert changed.by_replica[1].forward == (0.04, 0.08, 0.04)
    assert changed.cost == detector.cost == largest(changed.by_replica)
    assert changed.cost.forward == (0.04, 0.08, 0.04)


def test_changes_of_two_replicas_in_one_step_are_one_detection() -> None:
    late = COST.with_latency(0, 1, 0.05)
    _, (_, changed) = detections({0: late, 1: slow(2, 1.5)})
    edge, stage = changed.changes
    assert isinstance(edge, EdgeChange) and isinstance(stage, StageChange)
    assert (edge.replica, edge.where, stage.where) == (0, (0, 0, 1), (1, 2))
    assert str(edge).startswith("edge 0→1 of replica 0 slow: 50.0 ms")
    assert changed.by_replica[0].latency(0, 1) == 0.05 and changed.by_replica[1].latency(0, 1) == 2e-4


def test_what_may_follow_is_foreseen_for_the_replica_that_it_is_of() -> None:
    detector, _ = detections({}, steps=6)
    measurements = measured(6, {1: slow(1, 2.0)})
    assert detector.observe(measurements) is None
    foreseen = detector.foresee(measurements)
    assert foreseen is not None and [change.where for change in foreseen.changes] == [(1, 1)]
    assert detector.observe(measured(7)) is None
    assert detector.foresee(measured(7)) is None


def test_updates_are_known_from_the_calibration_and_do_not_count_waits_for_other_replicas() -> None:
    """Worker 0 waits in REDUCE for 0.3 s. Besides REDUCE it updates for 0.05 s, and the other one for 0.07 s."""
    detector = JobDetector(COST, REPLICAS, STAGES)
    found: list[Detection | None] = []
    for step in range(12):
        steps = measured(step, {1: slow(1, 2.0)} if step >= 6 else None)
        for worker, (reduce, update) in {0: (0.31, 0.36), STAGES: (0.01, 0.08)}.items():
            times = ReduceTimes(step - 1, reduce, None, 64) if step else None
            steps[worker] = replace(steps[worker], reduce=times, update=update if step else None)
        found.append(detector.observe(steps))
    calibrated, changed = (one for one in found if one is not None)
    for one in (calibrated, changed, detector.latest):
        assert [cost.update for cost in one.by_replica] == [pytest.approx((0.06, 0, 0)), pytest.approx((0.08, 0, 0))]
        assert one.cost.update == one.by_replica[1].update


def test_noise_of_two_hundredths_is_no_change() -> None:
    noise = random.Random(5)
    detector = JobDetector(COST, REPLICAS, STAGES)
    found = [detector.observe(measured(step, None, noise)) for step in range(400)]
    assert [one.changes for one in found if one is not None] == [()]
    assert max(detector.latest.cost.forward) < 0.044
