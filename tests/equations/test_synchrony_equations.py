"""The equations of synchronisation modes: what age costs, what is solved against what it solves, and every symbol explained."""

from __future__ import annotations

import dataclasses
import math

import pytest

from adaptra.equations.equation import Equation, legend
from adaptra.equations.synchrony import SYNCHRONY_SYMBOLS, synchrony_equations

MODEL = synchrony_equations()
EVERY: list[Equation] = [getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)]


@pytest.mark.parametrize("equation", EVERY, ids=lambda equation: equation.title)
def test_an_equation_takes_its_own_symbols(equation: Equation) -> None:
    assert {str(symbol) for symbol in equation.expression.free_symbols} == {str(symbol) for symbol in equation.arguments}


def test_every_symbol_of_synchrony_is_explained() -> None:
    assert set(legend(EVERY, SYNCHRONY_SYMBOLS)) == set(SYNCHRONY_SYMBOLS)
    assert all(equation.symbols <= set(SYNCHRONY_SYMBOLS) for equation in EVERY)


def largest_stable_rate(age: int) -> float:
    """By trying: x' = x - rate * (x before) shrinks below this rate, and grows above. Before is `age` updates ago."""
    low, high = 0.0, 3.0
    for _ in range(30):
        rate = (low + high) / 2
        past = [1.0] * (age + 1)
        for _ in range(400 * (age + 1)):
            past.append(past[-1] - rate * past.pop(0))
        low, high = (rate, high) if max(map(abs, past)) < 1 else (low, rate)
    return low


@pytest.mark.parametrize("age", [0, 1, 2, 5])
def test_age_costs_what_it_takes_from_the_largest_stable_rate(age: int) -> None:
    assert MODEL.staleness.evaluate(age) == pytest.approx(largest_stable_rate(0) / largest_stable_rate(age), rel=0.02)


def test_asynchronous_is_never_shorter_where_all_replicas_are_equally_fast() -> None:
    """STAR's cost, without age, says that it always is."""
    for replicas in (2, 4, 8, 64, 1024):
        for phi in (1, 100, 1e4, 1e6):
            asynchronous = MODEL.time.evaluate(1 / replicas, replicas - 1, phi, 128)
            exact = MODEL.time.evaluate(1, 0, phi, 128 * replicas)
            assert asynchronous >= exact * (1 - 1e-12)
            stars = (MODEL.star_cost.evaluate(1 / replicas, phi, 1, 128), MODEL.star_cost.evaluate(1, phi, replicas, 128))
            assert stars[0] < stars[1]


def test_noise_and_signal_solve_their_expectations() -> None:
    noise, signal, replicas, samples = 70.0, 2.5, 8, 16
    terms, mean = signal + noise / samples, signal + noise / (samples * replicas)
    assert MODEL.noise.evaluate(terms, mean, replicas, samples) == pytest.approx(noise)
    assert MODEL.signal.evaluate(terms, mean, replicas) == pytest.approx(signal)
    assert MODEL.noise_scale.evaluate(noise, signal) == pytest.approx(28)


def test_the_published_interval_is_asynchronous_at_the_fastest_and_the_slowest_at_the_last() -> None:
    between = 1 / (3 / 0.3 + 1 / 0.6)
    assert MODEL.star_interval.evaluate(between, 0.3, 0.3, 0.6) == pytest.approx(between)
    assert MODEL.star_interval.evaluate(between, 0.3, 0.6, 0.6) == pytest.approx(0.6)
    assert math.isclose(MODEL.star_limited.evaluate(0.6, 4, 2), 1.2)


def test_seconds_of_exact_capacity_and_local_meet_where_they_must() -> None:
    assert MODEL.exact.evaluate(1, 10) == MODEL.capacity.evaluate(8, 1 / 8, 10) == MODEL.local.evaluate(1, 10, 1) == 11
    assert MODEL.local.evaluate(1, 10, 32) == 1.3125
