"""The equations of lasting slowness: their symbols, their limits, and waiting against foresight."""

from __future__ import annotations

import dataclasses

import pytest

from adaptra.equations.equation import Equation, legend
from adaptra.equations.persistence import PERSISTENCE_SYMBOLS, persistence_equations

MODEL = persistence_equations()
EVERY: list[Equation] = [getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)]


@pytest.mark.parametrize("equation", EVERY, ids=lambda equation: equation.title)
def test_an_equation_of_slowness_takes_its_own_symbols(equation: Equation) -> None:
    assert {str(symbol) for symbol in equation.expression.free_symbols} == {str(symbol) for symbol in equation.arguments}


def test_every_symbol_of_persistence_is_explained() -> None:
    assert set(legend(EVERY, PERSISTENCE_SYMBOLS)) == set(PERSISTENCE_SYMBOLS)


def test_a_prior_rules_without_data_and_fades_with_it() -> None:
    assert MODEL.hazard.evaluate(0, 0, 0.5, 0.25) == 0.25
    assert MODEL.hazard.evaluate(3000, 10000, 0.5, 0.25) == pytest.approx(
        1 - MODEL.kaplan_meier.evaluate(3000, 10000), abs=1e-4
    )


@pytest.mark.parametrize("rest", [0, 1, 7, 8, 9, 1000])
def test_a_wait_for_as_long_as_the_price_costs_at_most_twice_foresight(rest: int) -> None:
    slow, price = 0.5, 4.0
    most = MODEL.latest.evaluate(price, slow)
    cost = MODEL.waiting.evaluate(slow, min(rest, most), price, float(rest >= most))
    assert cost <= 2 * min(slow * rest, price)
    assert MODEL.pays.evaluate(slow, rest, price) == (rest > most)
