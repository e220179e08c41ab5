"""The hazard that a spell of slowness ends, by its age and by what the machine says meanwhile.

Spells whose end was not seen count for the steps that they were seen (Kaplan and Meier). Ages are grouped, since a job sees
few spells. The hazard of a group has a Gamma prior, whose mean is the hazard of all ages or of the group before. The likelihood
decides which of both it is, and how many ended spells it is worth. Beyond the oldest spell the last hazard stays.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, product, takewhile
from typing import Final

_PRIOR_STEPS: Final = 32.0
"""The length of a spell before any is seen."""
_WORTHS: Final = (0.5, 2.0, 8.0, 32.0)
"""The ended spells that a prior may be worth: much where the hazard hardly differs between ages."""
_OLDEST: Final = 1 << 20
_GROWTH: Final = 1.25
"""The first age of a group over that of the group before, at least."""
_MOST_ROWS: Final = 512
"""The latest steps of slowness, by groups of ages, that coefficients of figures are fitted to."""
_ROUNDS: Final = 12
_CONVERGED: Final = 0.02
_DEVIATION: Final = 3.0
"""Of the prior of coefficients."""
_LARGEST: Final = 20.0
"""Of log odds: more is certainty."""

Figures = Sequence[float]
"""What a machine says in one step, such as its pressure."""

Hazard = Callable[[int, Figures], float]
"""The chance that a spell of this age, in steps, ends with it, given the figures of its last step."""


@dataclass(frozen=True, slots=True)
class Spell:
    """Steps in a row in which a worker is slow.

    Attributes:
        worker: Its number.
        steps: For how many steps it was seen slow.
        has_ended: Whether its end was seen. If not, it lasted longer.
        figures: The figures of each of its steps; empty without.
    """

    worker: int
    steps: int
    has_ended: bool
    figures: tuple[Figures, ...] = ()

    @property
    def chances(self) -> int:
        """The steps with which it could have ended, as far as is known."""
        return self.steps if self.has_ended else self.steps - 1

    def spans(self) -> Iterator[range]:
        """Yield these steps by groups of ages, from the first group on."""
        for group, first in enumerate(takewhile(lambda age: age <= self.chances, _FIRST_AGES)):
            yield range(first, min(self.chances, _last_age(group)) + 1)


_FIRST_AGES: Final = tuple(
    takewhile(lambda age: age < _OLDEST, accumulate(count(), lambda age, _: max(age + 1, int(age * _GROWTH)), initial=1))
)
"""The first age of each group."""


def _group(age: int) -> int:
    return bisect_right(_FIRST_AGES, age) - 1


def _last_age(group: int) -> int:
    return _FIRST_AGES[group + 1] - 1 if group + 1 < len(_FIRST_AGES) else _OLDEST


def _posterior(ended: float, seen: float, worth: float, before: float) -> float:
    """The equation ``hazard`` of :mod:`adaptra.equations.persistence`, without its sympy: it is taken thousands of times."""
    return (ended + worth) / (seen + worth / before)


def _log_likelihood(ended: int, seen: int, worth: float, before: float) -> float:
    """Return the logarithm of the chance of this number of ends: Poisson with a hazard of the prior, so negative binomial."""
    rate = worth / before
    ways = math.lgamma(ended + worth) - math.lgamma(worth) - math.lgamma(ended + 1)
    return ways + worth * math.log(rate / (rate + seen)) + (ended * math.log(seen / (rate + seen)) if ended else 0.0)


def hazard_by_age(spells: Sequence[Spell], worker: int | None = None) -> Hazard:
    """Return the hazard by age alone.

    Args:
        spells: What was seen of all workers.
        worker: Whose hazard it is. Its own spells count beside a prior, which is the hazard of all. None for that of all.
    """
    hazards = _by_group(spells, None)
    if worker is not None:
        hazards = _by_group([spell for spell in spells if spell.worker == worker], hazards)
    return lambda age, _figures: hazards[_group(age)]


def _by_group(spells: Sequence[Spell], before: Sequence[float] | None) -> list[float]:
    """Return the hazard of each group of ages, with those before as means of the priors if there are any."""
    ended, seen = ([0] * len(_FIRST_AGES) for _ in range(2))
    for spell in spells:
        for group, ages in enumerate(spell.spans()):
            seen[group] += len(ages)
        if spell.has_ended:
            ended[_group(spell.steps)] += 1
    every = _posterior(sum(ended), sum(seen), _WORTHS[0], 1 / _PRIOR_STEPS)
    best, likeliest = list[float](), -math.inf
    for is_smooth, worth in product((False, True), _WORTHS):
        hazards, likelihood = list[float](), 0.0
        for group, (ends, chances) in enumerate(zip(ended, seen, strict=True)):
            mean = hazards[-1] if hazards and (is_smooth or not chances) else every
            prior = mean if before is None else before[group]
            likelihood += _log_likelihood(ends, chances, worth, prior)
            hazards.append(_posterior(ends, chances, worth, prior))
        if likelihood > likeliest:
            best, likeliest = hazards, likelihood
    return best


def hazard_by_figures(spells: Sequence[Spell], by_age: Hazard) -> Hazard:
    """Return the hazard by age and figures.

    Log odds, of which some are by age and some by each figure. Age counts less if figures explain why old spells go on.
    Coefficients are in standard deviations of a figure, with a normal prior. They are fitted by Newton's method, one at a time.

    Args:
        spells: What was seen; those without figures say nothing.
        by_age: The hazard by age.
    """
    rows = [row for spell in spells if spell.figures for row in _rows(spell, by_age)][-_MOST_ROWS:]
    width = min((len(figures) for _, figures, _, _ in rows), default=0)
    if not width:
        return by_age
    columns = [_Column([odds for odds, _, _, _ in rows])]
    columns += [_Column([figures[which] for _, figures, _, _ in rows]) for which in range(width)]
    outcomes = [(float(has_ended), float(chances)) for _, _, has_ended, chances in rows]
    level, *coefficients = _fit(columns[0].values, [[1.0] * len(rows), *(column.scaled for column in columns)], outcomes)

    def hazard(age: int, figures: Figures) -> float:
        odds = _log_odds(by_age(age, ()))
        if len(figures) < width:
            return by_age(age, ())
        moves = (column.scale(value) * by for column, value, by in zip(columns, (odds, *figures), coefficients, strict=False))
        return _chance(odds + level + math.fsum(moves))

    return hazard


class _Column:
    """A figure in all rows, and in standard deviations from its mean.

    Args:
        values: By row.
    """

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self._mean = math.fsum(values) / len(values)
        self._deviation = math.sqrt(math.fsum((value - self._mean) ** 2 for value in values) / len(values))

    def scale(self, value: float) -> float:
        """Return a value in standard deviations; 0 where all were equal."""
        return (value - self._mean) / self._deviation if self._deviation > 0 else 0.0

    @property
    def scaled(self) -> list[float]:
        """All values in standard deviations."""
        return [*map(self.scale, self.values)]


def _rows(spell: Spell, by_age: Hazard) -> Iterator[tuple[float, Figures, bool, int]]:
    """Yield for each group of ages the odds by age, the first figures, whether the spell ended, and the steps with which."""
    for ages in spell.spans():
        has_ended = spell.has_ended and ages[-1] == spell.steps
        yield _log_odds(by_age(ages[0], ())), spell.figures[ages[0] - 1], has_ended, len(ages)


def _fit(odds: list[float], columns: Sequence[Sequence[float]], outcomes: Sequence[tuple[float, float]]) -> list[float]:
    """Return the coefficients of the columns. A step of Newton is never longer than 1, so that it does not overshoot."""
    coefficients = [0.0] * len(columns)
    for _ in range(_ROUNDS):
        largest = 0.0
        for which, column in enumerate(columns):
            slope, bend = -coefficients[which] / _DEVIATION**2, 1 / _DEVIATION**2
            for x, before, (ended, seen) in zip(column, odds, outcomes, strict=True):
                chance = _chance(before)
                slope += x * (ended - seen * chance)
                bend += x * x * seen * chance * (1 - chance)
            move = max(-1.0, min(1.0, slope / bend))
            coefficients[which] += move
            largest = max(largest, abs(move))
            odds = [before + move * x for before, x in zip(odds, column, strict=True)]
        if largest < _CONVERGED:
            break
    return coefficients


def _log_odds(chance: float) -> float:
    return math.log(chance / (1 - chance)) if chance < 1 else _LARGEST


def _chance(odds: float) -> float:
    return 1 / (1 + math.exp(-max(-_LARGEST, min(_LARGEST, odds))))


def lasting(hazard: Hazard, age: int, steps: int, figures: Figures = ()) -> list[float]:
    """Return the chance that a spell of this age goes on for 0, 1, …, ``steps`` more steps, if figures stay as they are."""
    goes_on = (1 - hazard(age + step, figures) for step in range(steps))
    return [*accumulate(goes_on, float.__mul__, initial=1.0)]
