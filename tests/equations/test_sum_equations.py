"""The equations of a sum over ranks: StragglAR's figures, published ratios, and solved forms against what they solve."""

from __future__ import annotations

import dataclasses
import math

import pytest

from adaptra.equations.equation import Equation, legend
from adaptra.equations.sums import SUM_SYMBOLS, sum_equations

MODEL = sum_equations()
EVERY: list[Equation] = [getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)]
GIB = 2**30, 3e-3, 1e3 / (450 * 2**30)
"""1 GiB, 3 µs a message and 450 GiB/s, in milliseconds."""


def doublings(ranks: int) -> int:
    return (ranks - 1).bit_length()


@pytest.mark.parametrize("equation", EVERY, ids=lambda equation: equation.title)
def test_an_equation_takes_its_own_symbols_and_fills_them_in(equation: Equation) -> None:
    assert {str(symbol) for symbol in equation.expression.free_symbols} == {str(symbol) for symbol in equation.arguments}
    filled = equation.with_values(*range(2, 2 + len(equation.arguments)))
    assert not set(filled.replace("(", " ").replace(")", " ").replace("*", " ").split()) & set(SUM_SYMBOLS)


def test_every_symbol_is_explained() -> None:
    assert set(legend(EVERY, SUM_SYMBOLS)) == set(SUM_SYMBOLS)
    assert all(equation.symbols <= set(SUM_SYMBOLS) for equation in EVERY)


@pytest.mark.parametrize(
    ("ranks", "merge", "gather", "ring", "critical", "rounds"),
    [
        (4, 2.975, 1.4875, 3.3513, 1.1111, 4),
        (6, 3.1321, 1.7898, 3.7337, 1.1882, 7),
        (8, 2.8841, 1.9228, 3.9309, 0.876, 9),
        (12, 2.8703, 2.0502, 4.1401, 0.9854, 15),
        (48, 2.6146, 2.3129, 4.6339, 0.5451, 57),
        (64, 2.6026, 2.3729, 4.753, 0.2225, 68),
        (256, 3.0692, 2.9755, 5.9571, 0.0876, 262),
    ],
)
def test_the_model_has_the_figures_of_stragglar(
    ranks: int, merge: float, gather: float, ring: float, critical: float, rounds: int
) -> None:
    """Its merge cuts the sum in N-1 parts, and its late rank adds too. The figures are milliseconds for 1 GiB.

    Its critical delays are those of its own rounds. For 12 and 48 ranks it has more rounds than it needs.
    """
    parts, spread = ranks - 1, doublings(ranks) - 1
    assert MODEL.gather.evaluate(ranks, parts, *GIB) == pytest.approx(gather, rel=1e-3)
    assert MODEL.merge.evaluate(100, ranks, parts, spread, *GIB) == pytest.approx(100 + merge, rel=1e-3 * merge / 100)
    assert MODEL.merge.evaluate(0, ranks, parts, spread, *GIB) == pytest.approx(gather + merge, rel=1e-3)
    assert MODEL.direct.evaluate(0, ranks, *GIB) == pytest.approx(ring, rel=1e-3)
    assert MODEL.critical_delay.evaluate(ranks, parts, rounds - parts, *GIB) == pytest.approx(critical, rel=1e-3)


@pytest.mark.parametrize(("ranks", "ratio"), [(4, 1.36), (8, 1.56), (16, 1.66), (32, 1.73)])
def test_merge_is_that_much_shorter_behind_a_late_rank(ranks: int, ratio: float) -> None:
    spread = doublings(ranks)
    parts = round(MODEL.merge_parts.evaluate(spread, *GIB))
    late = MODEL.gather.evaluate(ranks, parts, *GIB)
    merge = MODEL.merge.evaluate(late, ranks, parts, spread, *GIB) - late
    assert MODEL.direct.evaluate(0, ranks, *GIB) / merge == pytest.approx(ratio, abs=0.005)


def test_solved_forms_solve_their_equations() -> None:
    parts, each = MODEL.merge_parts.evaluate(3, *GIB), MODEL.streamed_parts.evaluate(8, 2, *GIB)
    for factor in (0.9, 1.1):
        assert MODEL.merge.evaluate(9, 8, parts * factor, 3, *GIB) > MODEL.merge.evaluate(9, 8, parts, 3, *GIB)
        assert MODEL.streamed.evaluate(9, 8, 2, each * factor, *GIB) > MODEL.streamed.evaluate(9, 8, 2, each, *GIB)
    chained = MODEL.chain_parts.evaluate(8, *GIB)
    assert MODEL.chain.evaluate(0, 8, chained, *GIB) < min(MODEL.chain.evaluate(0, 8, chained * f, *GIB) for f in (0.9, 1.1))
    late = MODEL.most_late.evaluate(8, each, *GIB)
    assert MODEL.streamed.evaluate(99, 8, late, each, *GIB) == pytest.approx(MODEL.direct.evaluate(99, 8, *GIB))
    delay = MODEL.critical_delay.evaluate(8, 46, 3, *GIB)
    assert MODEL.merge.evaluate(delay, 8, 46, 3, *GIB) == pytest.approx(MODEL.direct.evaluate(delay, 8, *GIB))
    assert not math.isclose(delay, 0.0)
