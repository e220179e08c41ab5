"""The gradient noise scale, from norms that the sum over replicas has at hand: unbiased, averaged over steps, with its spread.

A sum over P replicas has each replica's gradient T_p before they are added, and their mean G. Both are of the same parameters.
Let T_p be a mean over b_p samples, and G one over all B samples. Let g be the gradient without noise, and V the trace of the
covariance of one sample's gradient. Then (McCandlish et al., 2018, appendix A)::

    E|T_p|² = |g|² + V/b_p        E|G|² = |g|² + V/B

The paper takes one of the T_p. All of them together, weighted by their samples, say more and cost no more::

    A = sum(b_p/B |T_p|²)         E A = |g|² + P·V/B

Two equations with two unknowns: V = B (A - |G|²) / (P - 1) and |g|² = (P |G|² - A) / (P - 1), as
:class:`adaptra.equations.synchrony.SynchronyEquations` has them. Both are unbiased; their quotient V/|g|² would not be. So both
are averaged over steps first. Steps before count less and less, since noise grows as training goes on.

The interval is Fieller's for a quotient of two means, which vary together from step to step. Where the gradient can't be told
from noise it has no upper end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

from adaptra.equations.synchrony import synchrony_equations
from adaptra.errors import OptionError

_LEAST_STEPS: Final = 3
"""With fewer steps the spread of a mean says nothing."""


@dataclass(frozen=True, slots=True)
class TermNorms:
    """Squared norms of one step's gradients. Those of parts of the parameters add up to those of all: see :meth:`plus`.

    Attributes:
        terms: The squared norm of each replica's mean gradient, in the order of replicas.
        mean: The squared norm of the mean over all replicas.
    """

    terms: tuple[float, ...]
    mean: float

    def plus(self, other: TermNorms) -> TermNorms:
        """Return the norms of two disjoint parts of the parameters together, such as those of two owners or stages."""
        return TermNorms(tuple(one + more for one, more in zip(self.terms, other.terms, strict=True)), self.mean + other.mean)


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """A noise scale with its spread.

    Attributes:
        value: The estimate, in samples; infinite where no gradient is left beside the noise.
        low: The lower end of its interval.
        high: The upper end; infinite where the gradient can't be told from noise.
        noise: The estimated trace of the covariance of one sample's gradient.
        signal: The estimated squared norm of the gradient without noise. May be negative.
        steps: The number of steps that were added.
    """

    value: float
    low: float
    high: float
    noise: float
    signal: float
    steps: int

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {name: getattr(self, name) for name in ("value", "low", "high", "noise", "signal", "steps")}


class NoiseScaleEstimator:
    """Averages noise and signal over steps.

    Args:
        samples: The samples of each replica's gradient: one number for all, or one per replica.
        replicas: The number of replicas.
        steps: How many steps the average looks back: the weight of a step falls by 1/steps with each that follows.
        confidence: The share of intervals that should hold the true value.

    Raises:
        OptionError: There is one replica, or another argument is out of range.
    """

    def __init__(
        self, samples: float | Sequence[float], replicas: int, *, steps: float = 100.0, confidence: float = 0.95
    ) -> None:
        if replicas < 2:
            raise OptionError(
                f"replicas={replicas}: expected at least 2: the noise scale is known by how their gradients differ"
            )
        counts = _counts(samples, replicas)
        if not steps > 1:
            raise OptionError(f"steps={steps!r}: expected more than 1")
        if not 0 < confidence < 1:
            raise OptionError(f"confidence={confidence!r}: expected a number between 0 and 1")
        self._counts, self._decay, self._confidence = counts, 1 - 1 / steps, confidence
        self._added = 0
        self._average = _PairAverage()

    def add(self, norms: TermNorms, samples: Sequence[float] | None = None) -> None:
        """Take in one step.

        Args:
            norms: Its norms.
            samples: The samples of each replica's gradient in this step, if not those of all.

        Raises:
            OptionError: The norms are of another number of replicas, or not finite; or samples as of the class.
        """
        counts = self._counts if samples is None else _counts(samples, len(self._counts))
        if len(norms.terms) != len(counts):
            raise OptionError(f"norms of {len(norms.terms)} replicas: expected {len(counts)}")
        if not all(math.isfinite(value) and value >= 0 for value in (*norms.terms, norms.mean)):
            raise OptionError(f"norms {norms}: expected finite numbers that are not negative")
        model, replicas, total = synchrony_equations(), len(counts), sum(counts)
        terms = sum(count / total * norm for count, norm in zip(counts, norms.terms, strict=True))
        noise = model.noise.evaluate(terms, norms.mean, replicas, total / replicas)
        self._average.add(noise, model.signal.evaluate(terms, norms.mean, replicas), self._decay)
        self._added += 1

    @property
    def estimate(self) -> NoiseScale | None:
        """The noise scale of the steps so far; None before the first step."""
        if not self._added:
            return None
        noise, signal = self._average.means
        value = max(0.0, synchrony_equations().noise_scale.evaluate(noise, signal)) if signal > 0 else math.inf
        low, high = self._average.quotient_interval(self._confidence) if self._added >= _LEAST_STEPS else (0.0, math.inf)
        return NoiseScale(value, low, high, noise, signal, self._added)


def _counts(samples: float | Sequence[float], replicas: int) -> tuple[float, ...]:
    counts = (float(samples),) * replicas if isinstance(samples, int | float) else tuple(samples)
    if len(counts) != replicas or not all(math.isfinite(count) and count > 0 for count in counts):
        raise OptionError(f"samples={samples!r}: expected numbers above 0, one for each of {replicas} replicas")
    return counts


class _PairAverage:
    """Weighted means of two numbers, with the covariance of these means; weights fall with every later pair."""

    def __init__(self) -> None:
        self._weight = self._squares = 0.0
        self._first = self._second = 0.0
        self._spread = (0.0, 0.0, 0.0)

    def add(self, first: float, second: float, decay: float) -> None:
        """Take in a pair with weight 1, after the weights before have fallen."""
        self._weight, self._squares = decay * self._weight + 1, decay * decay * self._squares + 1
        before = first - self._first, second - self._second
        self._first += before[0] / self._weight
        self._second += before[1] / self._weight
        after = first - self._first, second - self._second
        products = before[0] * after[0], before[0] * after[1], before[1] * after[1]
        self._spread = tuple(decay * old + new for old, new in zip(self._spread, products, strict=True))

    @property
    def means(self) -> tuple[float, float]:
        """The two means."""
        return self._first, self._second

    def quotient_interval(self, confidence: float) -> tuple[float, float]:
        """Return Fieller's interval for the quotient of the means, of which neither can truly be negative."""
        effective = self._weight * self._weight / self._squares
        times = students_t(confidence, effective - 1)
        # The unbiased covariance of a pair, and from it that of the means.
        scale = times * times * self._squares / self._weight / (self._weight * self._weight - self._squares)
        of_first, of_both, of_second = (scale * spread for spread in self._spread)
        a = self._second * self._second - of_second
        b = self._first * self._second - of_both
        c = self._first * self._first - of_first
        inner = b * b - a * c
        if a > 0 and self._second > 0:
            root = math.sqrt(max(0.0, inner))
            return max(0.0, (b - root) / a), max(0.0, (b + root) / a)
        if a < 0 < inner:  # all but what lies between the roots
            lower, upper = sorted(((b - math.sqrt(inner)) / a, (b + math.sqrt(inner)) / a))
            return (0.0 if lower > 0 else max(0.0, upper)), math.inf
        return 0.0, math.inf


def students_t(confidence: float, freedom: float) -> float:
    """Return the quantile of Student's t for both sides, by the series of Abramowitz and Stegun, 26.7.5."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
