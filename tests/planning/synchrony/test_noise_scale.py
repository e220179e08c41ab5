"""The gradient noise scale from norms of sums, against single-sample gradients whose noise is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from adaptra.errors import OptionError
from adaptra.planning.synchrony.noise_scale import NoiseScale, NoiseScaleEstimator, TermNorms

SINGLE = 1000
"""Samples of the task, whose single gradients are all computed: their noise scale is known, not estimated."""


def check(
    seed: int, *, steps: int, counts: tuple[int, ...], rate: float = 0.0, look_back: float = 100.0
) -> tuple[NoiseScale, float]:
    """The estimate in a linear regression, and the true scale, averaged over the steps as the estimate is."""
    chance = np.random.default_rng(seed)
    inputs, right = chance.normal(size=(SINGLE, 20)), chance.normal(size=20)
    targets, weights = inputs @ right + chance.normal(size=SINGLE), right + 0.3 * chance.normal(size=20)
    estimator = NoiseScaleEstimator(counts, len(counts), steps=look_back)
    noise = signal = 0.0
    for _ in range(steps):
        gradients = (inputs @ weights - targets)[:, None] * inputs
        mean = gradients.mean(0)
        noise = (1 - 1 / look_back) * noise + ((gradients - mean) ** 2).sum(1).mean()
        signal = (1 - 1 / look_back) * signal + mean @ mean
        terms = [gradients[chance.integers(SINGLE, size=count)].mean(0) for count in counts]
        whole = np.average(terms, axis=0, weights=counts)
        estimator.add(TermNorms(tuple(float(term @ term) for term in terms), float(whole @ whole)))
        weights = weights - rate * whole
    estimate = estimator.estimate
    assert estimate is not None
    return estimate, noise / signal


@pytest.mark.parametrize(
    ("steps", "counts", "rate"),
    [
        (200, (16,) * 8, 0.0),
        (100, (4, 4), 0.0),
        (10, (8,) * 4, 0.0),
        (200, (4, 16, 16, 28), 0.0),
        (200, (16,) * 8, 0.005),
    ],
)
def test_the_true_scale_is_within_the_interval_in_18_of_20(steps: int, counts: tuple[int, ...], rate: float) -> None:
    checks = [check(seed, steps=steps, counts=counts, rate=rate) for seed in range(20)]
    assert sum(estimate.low <= true <= estimate.high for estimate, true in checks) >= 18
    assert all(estimate.low < estimate.value < estimate.high for estimate, _ in checks)


def test_more_steps_make_the_interval_narrow() -> None:
    estimate, true = check(3, steps=300, counts=(16,) * 8, look_back=300)
    assert estimate.high - estimate.low < 0.15 * true
    assert estimate.value == pytest.approx(true, rel=0.1)


def test_a_gradient_that_noise_hides_has_no_upper_end() -> None:
    chance = np.random.default_rng(0)
    estimator = NoiseScaleEstimator(4, 4)
    for _ in range(50):
        terms = chance.normal(size=(4, 30))
        estimator.add(TermNorms(tuple(map(float, (terms**2).sum(1))), float((terms.mean(0) ** 2).sum())))
    estimate = estimator.estimate
    assert estimate is not None and estimate.high == math.inf and estimate.low > 0
    assert estimate.noise == pytest.approx(4 * 30, rel=0.1) and abs(estimate.signal) < 1


def test_norms_of_parts_add_up_and_few_steps_say_nothing_of_spread() -> None:
    whole = TermNorms((1.0, 2.0), 1.0).plus(TermNorms((3.0, 2.0), 1.5))
    assert whole == TermNorms((4.0, 4.0), 2.5)
    assert NoiseScaleEstimator(8, 2).estimate is None
    estimator = NoiseScaleEstimator(8, 2)
    estimator.add(whole)
    estimate = estimator.estimate
    assert estimate is not None
    assert estimate == NoiseScale(24.0, 0.0, math.inf, 24.0, 1.0, 1)
    assert estimate.to_json()["value"] == 24.0


@pytest.mark.parametrize(
    ("samples", "replicas", "message"),
    [
        (8, 1, "replicas=1: expected at least 2: the noise scale is known by how their gradients differ"),
        ((8, 8, 8), 2, "samples=(8, 8, 8): expected numbers above 0, one for each of 2 replicas"),
        (0, 2, "samples=0: expected numbers above 0, one for each of 2 replicas"),
    ],
)
def test_what_no_noise_scale_can_be_known_of_is_refused(samples: float, replicas: int, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        NoiseScaleEstimator(samples, replicas)
    assert str(caught.value) == message


def test_samples_may_differ_from_step_to_step() -> None:
    """Steps of 2 and 6, and of 12 and 4 samples, whose norms are their expectations for noise 24 and signal 1."""
    estimator = NoiseScaleEstimator(1, 2)
    for counts in ((2.0, 6.0), (12.0, 4.0)):
        estimator.add(TermNorms(tuple(1 + 24 / one for one in counts), 1 + 24 / sum(counts)), counts)
    estimate = estimator.estimate
    assert estimate is not None and (estimate.noise, estimate.signal) == pytest.approx((24.0, 1.0))
    with pytest.raises(OptionError, match=r"^samples=\(2.0,\): expected numbers above 0, one for each of 2 replicas$"):
        estimator.add(TermNorms((1.0, 1.0), 1.0), (2.0,))


def test_norms_that_are_wrong_are_refused() -> None:
    estimator = NoiseScaleEstimator(8, 2)
    for norms in (TermNorms((1.0,), 1.0), TermNorms((1.0, math.nan), 1.0), TermNorms((1.0, 1.0), math.inf)):
        with pytest.raises(OptionError, match="norms"):
            estimator.add(norms)
    assert estimator.estimate is None
    for options in ({"steps": 1.0}, {"confidence": 1.0}):
        with pytest.raises(OptionError, match="expected"):
            NoiseScaleEstimator(8, 2, **options)
