"""The detector calibrates by measurement, finds slow and healed alike, and does not move for outliers or noise."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from measurements import ESTIMATED, HEALTHY, SLOW, STAGES, calibrated, measured, run

from adaptra.errors import ControlError
from adaptra.runtime.detection.changes import EdgeChange, StageChange
from adaptra.runtime.detection.detector import Detector
from adaptra.runtime.detection.flapping import MOST_RELAPSES
from adaptra.runtime.detection.level_shift import DetectorOptions, Level
from adaptra.runtime.measuring.measurement import EdgeEstimate, EdgeMeasurement, Stalls, StepMeasurement
from adaptra.simulation.cost import CostModel


def test_the_first_steps_replace_the_estimates_by_what_was_measured() -> None:
    """The slow first step is warm-up; memory, which nobody measures, stays."""
    detector = Detector(ESTIMATED)
    first = CostModel.uniform(STAGES, 3.0, 3.0, 3.0, latency=1.0)
    (detection,) = run(detector, [first, HEALTHY, HEALTHY, HEALTHY])
    assert (detection.step, detection.reason) == (3, "calibrated by measurement")
    assert detection.cost.forward == HEALTHY.forward
    assert detection.cost.latency_backward == pytest.approx(HEALTHY.latency_backward)
    assert detection.cost.memory_forward == ESTIMATED.memory_forward
    assert detector.slow_edges == ()


def test_a_slow_edge_is_found_after_two_steps_and_only_that_edge() -> None:
    detector = calibrated()
    slow = HEALTHY.with_latency(1, 2, 0.06)
    (detection,) = run(detector, [HEALTHY, slow, slow, slow, slow], first=4)
    assert detection.step == 6
    assert detection.reason == "edge 1→2 slow: 60.0 ms (was 0.2 ms)"
    assert detection.cost == slow
    assert detector.slow_edges == ((1, 2),)


def test_a_healed_edge_is_found_in_the_same_way() -> None:
    detector = calibrated()
    slow = HEALTHY.with_latency(2, 1, 0.06)
    became_slow, became_healed = run(detector, [slow] * 5 + [HEALTHY] * 5, first=4)
    assert became_slow.reason == "edge 2→1 slow: 60.0 ms (was 0.3 ms)"
    assert became_healed.reason == "edge 2→1 healed: 0.3 ms (was 60.0 ms)"
    assert became_healed.step == 10
    assert became_healed.cost == HEALTHY
    assert detector.slow_edges == ()


def test_a_change_in_the_middle_of_a_step_waits_until_steps_agree() -> None:
    """The step in which the link turned slow shows something in between, which is nobody's cost."""
    detector = calibrated()
    slow = HEALTHY.with_latency(1, 2, 0.06)
    (detection,) = run(detector, [HEALTHY.with_latency(1, 2, 0.03), slow, slow, slow], first=4)
    assert detection.step == 6
    assert detection.cost == slow


def test_a_slow_stage_is_found_with_its_factor() -> None:
    detector = calibrated()
    slow = CostModel(
        (0.02, 0.021, 0.0285, 0.02),
        (0.02, 0.02, 0.03, 0.02),
        (0.01, 0.01, 0.015, 0.01),
        HEALTHY.latency_forward,
        HEALTHY.latency_backward,
        HEALTHY.occupancy_forward,
        HEALTHY.occupancy_backward,
        memory_forward=HEALTHY.memory_forward,
    )
    became_slow, became_healed = run(detector, [slow] * 3 + [HEALTHY] * 3, first=4)
    assert became_slow.reason == "stage 2 slow: 1.50x the calibrated time"
    assert became_slow.cost == slow
    assert became_healed.reason == "stage 2 healed: 1.00x the calibrated time"


def test_a_lost_rate_shows_as_occupancy() -> None:
    detector = calibrated()
    slow = HEALTHY.with_occupancy(0, 1, 0.03)
    (detection,) = run(detector, [slow] * 4, first=4)
    assert detection.reason == "edge 0→1 slow: 30.2 ms (was 0.2 ms), 30.0 ms of it occupancy"
    assert detection.cost.occupancy_forward[0] == pytest.approx(0.03)
    assert detection.cost.latency_forward[0] == pytest.approx(2e-4)
    (healed,) = run(detector, [HEALTHY] * 4, first=8)
    assert healed.cost.occupancy_forward[0] <= 0.005
    assert "healed" in healed.reason


def test_single_outliers_move_nothing() -> None:
    detector = calibrated()
    outlier = HEALTHY.with_latency(1, 2, 0.5).with_latency(2, 1, 0.5)
    assert run(detector, [outlier, HEALTHY, HEALTHY, outlier, HEALTHY] * 4, first=4) == []
    assert detector.cost == HEALTHY


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_nothing_and_a_change_in_noise_is_found(seed: int) -> None:
    """Ten percent of noise on every duration and flight, for a hundred steps; then one edge turns slow."""
    noise = random.Random(seed)
    detector = Detector(ESTIMATED, DetectorOptions(calibration=6))
    found = [detector.observe(measured(step, HEALTHY, noise=lambda: noise.gauss(1.0, 0.1))) for step in range(100)]
    assert [detection.reason for detection in found if detection] == ["calibrated by measurement"]
    slow = HEALTHY.with_latency(1, 2, 0.06)
    later = [detector.observe(measured(step, slow, noise=lambda: noise.gauss(1.0, 0.1))) for step in range(100, 104)]
    changes = [change for detection in later if detection for change in detection.changes]
    assert [(change.source, change.destination) for change in changes if isinstance(change, EdgeChange)] == [(1, 2)]
    assert not any(isinstance(change, StageChange) for change in changes)
    assert all(0.995 < change.confidence <= 1.0 for change in changes)
    assert detector.cost.latency_forward[1] == pytest.approx(0.06, rel=0.3)


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_busy_machine_is_not_forgotten_when_a_level_has_moved(seed: int) -> None:
    """Durations scatter by half, some far more: two steps that happen to agree say little of how far the next ones scatter."""
    noise = random.Random(seed)
    detector = Detector(ESTIMATED)
    steps = (measured(step, HEALTHY, noise=lambda: noise.lognormvariate(0.0, 0.5)) for step in range(1000))
    changes = [found for found in map(detector.observe, steps) if found is not None and found.changes]
    assert len(changes) <= 6
    late = HEALTHY.with_latency(1, 2, 0.1)
    later = [detector.observe(measured(step, late, noise=lambda: noise.lognormvariate(0.0, 0.5))) for step in range(1000, 1012)]
    named = [change.where for found in later if found is not None for change in found.changes]
    assert (1, 2) in named


def test_confidence_is_how_far_beyond_noise_the_steps_agree_on_a_change() -> None:
    """The median deviation is 1 ms, so the standard deviation of normal noise 1.5: 6 ms are four of them."""
    options = DetectorOptions(noise=3.0)
    level = Level.calibrate([0.019, 0.02, 0.021], options)
    assert level.confidence == 0.0, "nothing is elsewhere"
    assert not level.moves(0.026, options, 0.001)
    once = level.confidence
    assert once == pytest.approx(1 - 1 / (1 + (6 / 1.4826) ** 2))
    assert level.moves(0.0265, options, 0.001)
    assert once < level.confidence == pytest.approx(1 - (1 - once) / (1 + (6.5 / 1.4826) ** 2))
    said = StageChange(2, 0.02, 0.026, 0.02, is_healed=False, confidence=once)
    assert str(said) == "stage 2 slow: 1.30x the calibrated time, 94 % sure"


def test_small_changes_are_not_worth_a_detection() -> None:
    """A millisecond more is a twentieth of a forward here."""
    assert run(calibrated(), [HEALTHY.with_latency(1, 2, 0.0012)] * 10, first=4) == []


def test_joint_backwards_keep_the_share_of_input_and_weight_gradients() -> None:
    detector = Detector(CostModel.uniform(STAGES, 1.0, 2.0, 1.0))
    for step in range(4):
        detector.observe(measured(step, HEALTHY, both=True))
    assert detector.cost.input_grad == pytest.approx((0.02,) * 4)
    assert detector.cost.weight_grad == pytest.approx((0.01,) * 4)


def test_measurements_of_another_pipeline_are_refused() -> None:
    detector = Detector(CostModel.uniform(2, 1.0, 1.0, 1.0))
    with pytest.raises(ControlError, match=r"measurement of stage 2: expected stages 0\.\.1"):
        detector.observe(measured(0, HEALTHY))
    skipping = EdgeMeasurement(0, 2, 1, 0.0, EdgeEstimate(1.0, None, None))
    with pytest.raises(ControlError, match=r"measurement of edge 0→2: expected neighbours of 0\.\.1"):
        detector.observe([StepMeasurement(0, 0, 1.0, (), (skipping,))])


def flapping() -> tuple[Detector, int]:
    """A detector of an edge that has turned slow again after it had healed, and its next step."""
    detector = calibrated()
    found = run(detector, [SLOW] * 3 + [HEALTHY] * 3 + [SLOW] * 3, first=4)
    assert [detection.reason for detection in found] == [
        "edge 1→2 slow: 60.0 ms (was 0.2 ms)",
        "edge 1→2 healed: 0.2 ms (was 60.0 ms)",
        "edge 1→2 slow (flapping): 60.0 ms (was 0.2 ms)",
    ]
    return detector, 13


def test_the_recovery_of_a_flapping_edge_is_detected_as_soon_as_any_and_held_off() -> None:
    detector, first = flapping()
    (healed,) = run(detector, [HEALTHY] * 6, first)
    assert healed.step == first + 1
    assert healed.reason == "edge 1→2 healed (flapping): 0.2 ms (was 60.0 ms)"
    assert healed.cost == HEALTHY
    assert healed.hold_off == 2


def test_the_hold_off_doubles_with_each_relapse_up_to_a_cap() -> None:
    detector, first = flapping()
    found = run(detector, ([HEALTHY] * 3 + [SLOW] * 3) * (MOST_RELAPSES + 1), first)
    recoveries, relapses = found[::2], found[1::2]
    assert [healed.hold_off for healed in recoveries] == [2, 4, 8, 16, 32, 32]
    assert {slow.hold_off for slow in relapses} == {0}, "a slowdown is acted on at once"


def test_a_first_recovery_is_not_held_off() -> None:
    found = run(calibrated(), [SLOW] * 3 + [HEALTHY] * 3, first=4)
    assert [detection.hold_off for detection in found] == [0, 0]


def test_another_edge_that_turns_slow_is_not_held_off() -> None:
    """Neither after the recovery of a flapping edge nor in the same step."""
    detector, first = flapping()
    other = HEALTHY.with_latency(3, 2, 0.04)
    *_, found = run(detector, [HEALTHY] * 6 + [other] * 2, first)
    assert (found.reason, found.hold_off) == ("edge 3→2 slow: 40.0 ms (was 0.3 ms)", 0)
    detector, first = flapping()
    (both,) = run(detector, [other] * 3, first)
    assert len(both.changes) == 2 and both.hold_off == 0


@pytest.mark.parametrize("latency", [0.02, 0.09])
def test_another_fault_where_it_flaps_is_found_by_its_own_level(latency: float) -> None:
    detector, first = flapping()
    other = HEALTHY.with_latency(1, 2, latency)
    *_, found = run(detector, [HEALTHY] * 3 + [other] * 3, first)
    assert found.step == first + 4
    assert found.reason == f"edge 1→2 slow (flapping): {1e3 * latency:.1f} ms (was 0.2 ms)"
    assert found.cost == other


def test_the_recovery_of_a_flapping_stage_is_held_off_in_the_same_way() -> None:
    detector = calibrated()
    slow = HEALTHY.with_stage(2, forward=0.05)
    assert len(run(detector, [slow] * 3 + [HEALTHY] * 3 + [slow] * 3, first=4)) == 3
    (healed,) = run(detector, [HEALTHY] * 3, first=13)
    assert (healed.step, healed.cost, healed.hold_off) == (14, HEALTHY, 2)


def test_relapses_are_forgotten_after_a_healthy_while() -> None:
    detector, first = flapping()
    again = run(detector, [HEALTHY] * 60 + [SLOW] * 3 + [HEALTHY] * 3, first)
    assert [detection.reason for detection in again] == [
        "edge 1→2 healed (flapping): 0.2 ms (was 60.0 ms)",
        "edge 1→2 slow: 60.0 ms (was 0.2 ms)",
        "edge 1→2 healed: 0.2 ms (was 60.0 ms)",
    ]


def test_messages_that_follow_each_other_less_closely_are_slower_however_long_each_takes() -> None:
    """The rate falls by as much as the latency."""
    detector = Detector(HEALTHY)
    run(detector, [HEALTHY.with_latency(1, 2, 0.03)] * 4)
    (found,) = run(detector, [HEALTHY.with_occupancy(1, 2, 0.03)] * 3, first=4)
    (change,) = found.changes
    assert isinstance(change, EdgeChange) and change.is_slower and not change.is_healed
    assert "edge 1→2 slow: " in found.reason


def test_a_change_that_the_next_step_may_confirm_is_foreseen_with_its_hold_off() -> None:
    detector, first = flapping()
    assert detector.foresee(measured(first - 1, SLOW)) is None
    assert run(detector, [HEALTHY], first) == []
    foreseen = detector.foresee(measured(first, HEALTHY))
    assert foreseen is not None
    assert (foreseen.cost, foreseen.hold_off) == (HEALTHY, 2)
    assert detector.cost == SLOW


def test_an_edge_that_turned_slow_is_foreseen_though_its_first_late_messages_look_like_one_stall() -> None:
    detector = calibrated()
    first = [
        replace(one, edges=tuple(replace(edge, stalls=Stalls(1, edge.messages, 0.06 * edge.messages)) for edge in one.edges))
        if one.rank == 2
        else one
        for one in measured(4, SLOW)
    ]
    assert detector.observe(first) is None
    foreseen = detector.foresee(first)
    assert foreseen is not None and foreseen.cost == SLOW
    (found,) = run(detector, [SLOW], first=5)
    assert found.cost == SLOW
