"""Steps with batches of many shapes: no shape is taken for a fault, and a fault is found by steps of any shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
from noisy_steps import CASE, Fault, NoisySteps

from adaptra.program import Kind
from adaptra.runtime.detection.changes import ChangeKind, EdgeChange, LossChange, StageChange
from adaptra.runtime.detection.detector import Detector
from adaptra.runtime.detection.shape_scales import COMPARISONS, RelativeSizes, ShapeScales
from adaptra.runtime.measuring.measurement import EdgeEstimate, EdgeMeasurement, StageMeasurement, StepMeasurement
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.simulation.cost import CostModel

EDGES = [(stage, stage + way) for stage in range(4) for way in (-1, 1) if 0 <= stage + way < 4]


def busy_links() -> CostModel:
    cost = CASE.cost
    for edge in EDGES:
        cost = cost.with_occupancy(*edge, 0.002)
    return cost


CASE_OF_LENGTHS = replace(CASE, cost=busy_links())
LENGTHS = [(1.0, 1.0), (0.5, 0.6), (2.0, 1.7), (1.5, 1.5), (0.7, 0.75), (3.0, 2.0), (1.2, 1.2), (0.8, 0.9)]
"""The real sizes, and the estimates of op times."""

BOTH = ((1, 2), (2, 1))


def run(seed: int, *faults: Fault, steps: int) -> NoisySteps:
    made = NoisySteps(CASE_OF_LENGTHS, seed, faults=faults, shapes=LENGTHS)
    for _ in range(steps):
        made.step()
    return made


@pytest.mark.parametrize("seed", [20, 21, 27])
def test_batches_of_many_lengths_are_no_fault(seed: int) -> None:
    found = run(seed, steps=250)
    assert [one.reason for one in found.detections] == ["calibrated by measurement"]
    assert found.switches == []


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(ChangeKind.BANDWIDTH, BOTH, 0.04, 200, 260), EdgeChange),
        (Fault(ChangeKind.LATENCY, BOTH, 0.06, 200, 260), EdgeChange),
        (Fault(ChangeKind.COMPUTE, ((2,),), 1.6, 200, 260), StageChange),
        (Fault(ChangeKind.LOSS, BOTH[:1], 0.2, 200, 260, 0.15), LossChange),
    ],
    ids=lambda one: one.kind.value if isinstance(one, Fault) else "",
)
def test_a_fault_is_found_and_its_end_where_no_two_batches_are_alike(fault: Fault, kind: type) -> None:
    """Where only one shape in eight told, the second slow step would come after about 16 steps."""
    found = run(2, fault, steps=290)
    calibration, begun, ended = found.detections
    assert calibration.step < 200 <= begun.step <= 204
    assert 261 <= ended.step <= 270
    assert {type(one) for one in (*begun.changes, *ended.changes)} == {kind}
    places = {(one.stage,) if isinstance(one, StageChange) else (one.source, one.destination) for one in begun.changes}
    assert places == set(fault.places)


def test_shapes_that_come_first_during_a_fault_are_learned_rightly() -> None:
    """The link is slow from before most shapes are known until long after."""
    found = run(2, Fault(ChangeKind.LATENCY, BOTH, 0.06, 60, 180), steps=260)
    changes = [one for one in found.detections if one.changes]
    assert [60 <= one.step <= 80 for one in changes] == [True, False], [one.reason for one in changes]
    assert all("healed" in part for part in changes[1].reason.split("; "))


def measured(
    step: int, seconds: float, flight: float = 0.01, occupancy: float | None = 0.004, rank: int = 1
) -> StepMeasurement:
    edge = EdgeMeasurement(rank - 1, rank, 4, 0.0, EdgeEstimate(flight, occupancy, 0.03))
    stage = StageMeasurement(rank, seconds, seconds, seconds, None)
    return StepMeasurement(rank, step, 12 * seconds, (stage,), (edge,) if rank else ())


SMALL, TWICE, HUGE = (RelativeSizes({0: size, 1: size}, {(0, 1): size}) for size in (1.0, 2.0, 9.0))


def test_the_first_shape_is_told_as_it_is() -> None:
    scales = ShapeScales()
    for step in range(5):
        one = measured(step, 0.1 / 3 + step / 700, flight=0.01 / 3)
        assert scales.convert(77, TWICE, one) == one


def test_a_shape_is_told_in_proportion_once_it_is_known() -> None:
    """Its ops take 2.5 times as long and not twice, its messages one millisecond more than by their bytes."""
    scales, told = ShapeScales(), 0
    for step in range(0, 60, 2):
        scales.convert(0, SMALL, measured(step, 0.02))
        found = scales.convert(5, TWICE, measured(step + 1, 0.05, 0.015, 0.008))
        assert bool(found.stages) == (step // 2 >= COMPARISONS), step
        if found.stages:
            told += 1
            assert found.stages[0].forward == pytest.approx(0.02)
            assert found.seconds == pytest.approx(12 * 0.02)
            assert found.edges[0].estimate.flight == pytest.approx(0.01)
            assert found.edges[0].estimate.occupancy == pytest.approx(0.004)
    assert told > 10
    slow = scales.convert(5, TWICE, measured(60, 0.1, 0.015 + 0.04, 0.008 + 0.04))
    assert slow.stages[0].forward == pytest.approx(0.04), "as slow as it is"
    assert slow.edges[0].estimate.occupancy == pytest.approx(0.024), "of messages half as large"
    assert slow.edges[0].estimate.flight == pytest.approx(0.01 + 0.02)


def test_a_shape_that_scatters_or_is_far_larger_is_never_told() -> None:
    scales = ShapeScales()
    for step in range(0, 200, 2):
        scales.convert(0, SMALL, measured(step, 0.02))
        assert not scales.convert(9, HUGE, measured(step + 1, 0.18)).stages
        scattering = measured(step + 1, 0.04 * (1.2 if step % 4 else 0.8))
        assert not scales.convert(5, TWICE, scattering).stages


def test_a_detector_takes_steps_of_which_some_ranks_tell_nothing() -> None:
    detector = Detector(CostModel.uniform(2, 0.02, 0.02, 0.02, latency=0.01))
    for step in range(40):
        whole = [measured(step, 0.02, rank=0), measured(step, 0.02, rank=1)]
        silent = step % 2 * (step > 10)
        given = [replace(one, stages=(), edges=()) if silent and one.rank == step // 2 % 2 else one for one in whole]
        found = detector.observe(given)
        assert found is None or not found.changes


def test_a_large_message_after_a_small_one_has_not_stalled() -> None:
    monitor = Monitor(1, (0, 1))
    for step in range(6):
        flight = 0.5 if step % 2 else 0.01
        for microbatch in range(4):
            sent = 10.0 * step + 2 * microbatch
            monitor.message(Kind.SEND_F, 0, 1, microbatch, 64, sent, sent, sent + flight, sent + flight)
        (edge,) = monitor.end_step(step, 10.0 * step, 10.0 * step + 9, shape=step % 2).edges
        assert edge.stalls.count == 0, step
        assert edge.estimate.flight == pytest.approx(flight)
