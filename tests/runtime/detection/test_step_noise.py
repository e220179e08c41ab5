"""A gain counts once it is beyond the scatter of steps, and what is slow counts once it lasts longer than a machine pauses."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
from measurements import HEALTHY, SLOW, measured

from adaptra.runtime.detection.detector import Detection, Detector
from adaptra.runtime.detection.step_noise import MOST_STEPS, StepNoise, steps_until_sure


def test_the_scatter_of_steps_is_known_though_some_turn_slow_and_heal() -> None:
    found: list[float] = []
    for seed in range(20):
        dice, noise = random.Random(seed), StepNoise(64)
        for step in range(64):
            noise.observe(dice.gauss(0.1 if step % 20 < 10 else 0.3, 0.01))
        found.append(noise.deviation)
        assert noise.last(0.25) == 3
    assert fmean(found) == pytest.approx(0.01, rel=0.3)


def test_a_gain_within_the_scatter_waits_for_as_many_steps_as_make_it_sure() -> None:
    assert steps_until_sure(0.02, 0.0) == 0, "a steady machine"
    assert steps_until_sure(0.02, 0.009) == 0, "of two steps the mean is sure enough"
    assert steps_until_sure(0.02, 0.04) == 3.0**2 * 2.0**2 - 2
    assert steps_until_sure(math.inf, 0.04) == 0, "exact messages are a gain without seconds"
    assert steps_until_sure(0.0, 0.04) == steps_until_sure(-1.0, 0.04) == MOST_STEPS


@pytest.mark.parametrize(("seconds", "steps"), [(1.0, 2), (0.06, 2), (0.008, 13)])
def test_short_steps_agree_for_a_tenth_of_a_second_before_they_count(seconds: float, steps: int) -> None:
    detector = Detector(HEALTHY)

    def observe(step: int) -> Detection | None:
        cost = HEALTHY if step < 20 else SLOW
        return detector.observe([replace(one, seconds=seconds) for one in measured(step, cost)])

    found = [detection.step for detection in map(observe, range(60)) if detection is not None and detection.changes]
    assert found == [20 + steps - 1]
