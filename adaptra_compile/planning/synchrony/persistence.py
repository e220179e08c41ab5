"""Whether a slow worker is still slow in some steps, and whether a change against it pays: rent or buy.

"As last time" says that what is slow stays slow, and so changes at once. The hazard is used only where it did better in this
job. Each spell of the past is judged by what was known when it began. The score of a chance is Brier's, that of a decision is
its cost. Both are best on average if the chances are true.

It is planning only: no running job asks it. ``bench/prediction.py`` says why.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Final, Literal

from adaptra.planning.synchrony.hazard import Figures, Hazard, Spell, hazard_by_age, hazard_by_figures, lasting

AS_LAST_TIME: Final = "as last time"
_KNOWN: Final = ("age", "age and figures")
"""What hazards are of, in the order in which they are preferred where they do equally well."""
_LEAST_SPELLS: Final = 8
"""Ended spells before a score counts."""
_STANDARD_ERRORS: Final = 2.0
"""By this number of them the mean score must be better."""
_MOST_SPELLS: Final = 128
"""The latest spells that are remembered."""
_MOST_QUESTIONS: Final = 4
_MOST_STEPS: Final = 512
"""No wait is planned for longer, and no rest is expected to be longer."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """A chance, and what it is known from: :data:`AS_LAST_TIME`, "age" or "age and figures"."""

    chance: float
    basis: str


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether to change now.

    Attributes:
        wait: The steps to wait, if slowness goes on; 0 to change now.
        rest: The expected steps of slowness from now on; None where nothing is known but that it is slow now.
        basis: As in :class:`Outlook`.
    """

    wait: int
    rest: float | None
    basis: str


_Question = tuple[Literal["steps", "price"], float]
"""The steps of a chance, or the price of a change."""
_Score = tuple[float, Sequence[float]]
"""That of "as last time", and that of each hazard."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """A spell that has ended, and the hazards as they were known when it began, in the order of the kinds."""

    spell: Spell
    hazards: tuple[Hazard, ...]
    scores: dict[_Question, _Score] = field(default_factory=dict[_Question, _Score])

    def score(self, question: _Question) -> _Score:
        """Return how good the answers to a question were; less is better."""
        if question not in self.scores:
            if len(self.scores) == _MOST_QUESTIONS:
                self.scores.clear()
            what, value = question
            if what == "steps":
                self.scores[question] = _brier(self.spell, self.hazards, int(value))
            else:
                self.scores[question] = value, [cost_of_waiting(self.spell, hazard, value) for hazard in self.hazards]
        return self.scores[question]


@dataclass(slots=True)
class _Open:
    """A spell that goes on."""

    steps: int
    figures: list[Figures]
    hazards: tuple[Hazard, ...]


def best_wait(hazard: Hazard, age: int, price: float, waited: int = 0, figures: Figures = ()) -> int:
    """Return the steps to wait before a change so that slowness and change cost least on average.

    It is never more than the price in all. So the cost exceeds that of foresight by at most one price, whatever the hazard.

    Args:
        hazard: The hazard that slowness ends.
        age: The steps for which it has lasted.
        price: The price of the change, there and back, in steps of slowness.
        waited: The steps of slowness since the change was possible.
        figures: The figures of the last step.
    """
    most = min(max(math.ceil(price) - waited, 0), _MOST_STEPS)
    best, wait, until = price, 0, 0.0
    for steps, chance in enumerate(lasting(hazard, age, most, figures)[1:], start=1):
        until += chance
        if (cost := until + price * chance) < best:
            best, wait = cost, steps
    return wait


def cost_of_waiting(spell: Spell, hazard: Hazard, price: float) -> float:
    """Return what decisions by a hazard cost in a spell, in steps of slowness. The first is made after its first step."""
    for age in range(1, spell.steps + 1):
        figures = spell.figures[age - 1] if spell.figures else ()
        if best_wait(hazard, age, price, age - 1, figures) == 0:
            return age - 1 + price
    return spell.steps - 1.0


class Persistence:
    """What a job has seen of slowness, and what follows from it.

    Args:
        workers: Whether a worker's own spells count more than those of others.
    """

    def __init__(self, *, workers: bool = True) -> None:
        self._workers = workers
        self._past: deque[Spell] = deque(maxlen=_MOST_SPELLS)
        self._judged: deque[_Judged] = deque(maxlen=_MOST_SPELLS)
        self._open: dict[int, _Open] = {}

    def slow(self, worker: int, figures: Figures = ()) -> None:
        """Take a step in which a worker was slow, with the figures of its machine."""
        if worker not in self._open:
            self._open[worker] = _Open(0, [], self._hazards(worker))
        spell = self._open[worker]
        spell.steps += 1
        if figures:
            spell.figures.append(figures)

    def ended(self, worker: int) -> None:
        """Take it that a worker is slow no more; nothing happens if it was not."""
        if (spell := self._close(worker, has_ended=True)) is not None:
            seen, hazards = spell
            self._judged.append(_Judged(seen, hazards))

    def lost(self, worker: int) -> None:
        """Take it that a worker is gone, or is watched no more: the end of its spell is not seen."""
        self._close(worker, has_ended=False)

    def _close(self, worker: int, *, has_ended: bool) -> tuple[Spell, tuple[Hazard, ...]] | None:
        if (spell := self._open.pop(worker, None)) is None:
            return None
        self._past.append(seen := _seen(worker, spell, has_ended=has_ended))
        return seen, spell.hazards

    def age(self, worker: int) -> int:
        """Return for how many steps a worker has been slow; 0 if it is not."""
        return self._open[worker].steps if worker in self._open else 0

    def still_slow(self, worker: int, steps: int) -> Outlook:
        """Return the chance that a worker, if it is slow now, is slow for this many more steps.

        A worker that is not slow has the chance 0: when slowness begins is not foreseen.
        """
        if worker not in self._open:
            return Outlook(0.0, AS_LAST_TIME)
        kind = self._best(("steps", steps))
        if kind is None:
            return Outlook(1.0, AS_LAST_TIME)
        spell = self._open[worker]
        chance = lasting(spell.hazards[kind], spell.steps, steps, _last(spell))[-1]
        return Outlook(chance, _KNOWN[kind])

    def advise(self, worker: int, price: float) -> Advice:
        """Return whether to change now against a worker's slowness.

        Args:
            worker: Its number; it is slow.
            price: The price of the change, there and back, in steps of its slowness.
        """
        spell = self._open[worker]
        kind = self._best(("price", price))
        if kind is None:
            return Advice(0, None, AS_LAST_TIME)
        hazard, figures = spell.hazards[kind], _last(spell)
        rest = math.fsum(lasting(hazard, spell.steps, _MOST_STEPS, figures)[1:])
        return Advice(best_wait(hazard, spell.steps, price, spell.steps - 1, figures), rest, _KNOWN[kind])

    def _hazards(self, worker: int) -> tuple[Hazard, ...]:
        spells = [*self._past, *(_seen(number, one, has_ended=False) for number, one in self._open.items())]
        by_age = hazard_by_age(spells, worker if self._workers else None)
        return (by_age, hazard_by_figures(spells, by_age)) if any(spell.figures for spell in spells) else (by_age,)

    def _best(self, question: _Question) -> int | None:
        """Return the kind of hazard with the best score, of those that are surely better than "as last time"."""
        scores = [judged.score(question) for judged in self._judged]
        gains: dict[int, float] = {}
        for kind in range(len(_KNOWN)):
            gained = [before - after[kind] for before, after in scores if kind < len(after)]
            if _is_better(gained):
                gains[kind] = fmean(gained)
        return max(gains, key=gains.__getitem__, default=None)


def _is_better(gained: Sequence[float]) -> bool:
    if len(gained) < _LEAST_SPELLS:
        return False
    return fmean(gained) > _STANDARD_ERRORS * stdev(gained) / math.sqrt(len(gained))


def _brier(spell: Spell, hazards: Sequence[Hazard], steps: int) -> _Score:
    """Return the mean score in a spell of "as last time", and of each hazard, at ages 1, 2, 4, and so on."""
    ages = [1 << power for power in range(spell.steps.bit_length())]
    outcomes = [float(age + steps <= spell.steps) for age in ages]
    scores = [
        fmean(
            (lasting(hazard, age, steps, spell.figures[age - 1] if spell.figures else ())[-1] - outcome) ** 2
            for age, outcome in zip(ages, outcomes, strict=True)
        )
        for hazard in hazards
    ]
    return fmean((1 - outcome) ** 2 for outcome in outcomes), scores


def _seen(worker: int, spell: _Open, *, has_ended: bool) -> Spell:
    figures = tuple(spell.figures) if len(spell.figures) == spell.steps else ()
    return Spell(worker, spell.steps, has_ended, figures)


def _last(spell: _Open) -> Figures:
    return spell.figures[-1] if len(spell.figures) == spell.steps else ()
