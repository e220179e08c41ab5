"""What each mode takes to a loss in a case, and which one is chosen, with the reason in words.

Exact modes and deadlines have gradients of one set of parameters: they take seconds of an update times updates needed.
Gradients that are old, and replicas that differ between exchanges, change training. The model's term for age is a guide, and of
local steps there is no formula. Of these only a trial decides, so none is chosen here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from adaptra.equations.synchrony import synchrony_equations
from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.clock import Pace, StepTimes, capacity, draw_times, pace_of
from adaptra.planning.synchrony.modes import Deadline, Local, Mode, Synchronous, is_trial, kind_of
from adaptra.planning.synchrony.star import star_references

_WORTH: Final = 0.01
"""A mode that takes less than this share of the time less is not worth leaving a simpler one."""


@dataclass(frozen=True, slots=True)
class ModePrice:
    """A mode, and what it takes.

    Attributes:
        mode: The mode.
        pace: Its seconds, samples and ages.
        updates: The updates that it needs, in units of those without noise and age. None where no formula says it.
    """

    mode: Mode
    pace: Pace
    updates: float | None

    @property
    def time(self) -> float | None:
        """Seconds of an update times updates needed; None where no formula says it."""
        return None if self.updates is None else self.pace.seconds * self.updates

    @property
    def is_exact(self) -> bool:
        """Whether all bits are those of one process."""
        return isinstance(self.mode, Synchronous)

    def to_json(self, exact: ModePrice) -> dict[str, Any]:
        """Return everything as JSON values, with the updates and the time over those of ``exact`` as well."""
        assert exact.updates is not None and exact.time is not None, "exact modes have a formula"
        return {
            "mode": str(self.mode),
            "kind": kind_of(self.mode),
            "seconds": self.pace.seconds,
            "samples": self.pace.samples,
            "age": self.pace.age,
            "most_age": self.pace.most_age,
            "updates": self.updates,
            "updates_of_exact": None if self.updates is None else self.updates / exact.updates,
            "time_of_exact": None if self.time is None else self.time / exact.time,
            "same_bits": self.is_exact,
            "trial": is_trial(self.mode),
        }


class ModeChoice:
    """All modes of a case, and the choice.

    Args:
        case: The case.
        seed: Of the drawn times.
    """

    def __init__(self, case: SynchronyCase, seed: int = 0) -> None:
        self.case = case
        self.times: StepTimes = draw_times(case, seed)

    @cached_property
    def prices(self) -> list[ModePrice]:
        """What each mode takes, ``exact`` first."""
        return [self.price(mode) for mode in self.case.all_modes]

    @property
    def exact(self) -> ModePrice:
        """What the mode takes that every job has."""
        return self.prices[0]

    @cached_property
    def capacity(self) -> float:
        """The seconds below which no exact update goes."""
        return capacity(self.case, self.times)

    def price(self, mode: Mode) -> ModePrice:
        """Return what a mode takes.

        Updates of different sizes and ages each bring training on by one part of the updates that such ones would need.
        """
        pace, model = pace_of(mode, self.case, self.times), synchrony_equations()
        if isinstance(mode, Local):
            return ModePrice(mode, pace, None)
        progress = sum(
            count / model.updates.evaluate(age, self.case.phi, samples) for (samples, age), count in pace.updates.items()
        )
        return ModePrice(mode, pace, sum(pace.updates.values()) / progress)

    @property
    def chosen(self) -> ModePrice:
        """The mode that takes least of those allowed that need no trial; of modes that take about as long, the first."""
        best = self.exact
        for price in self.prices[1:]:
            if self.is_allowed(price.mode) and not is_trial(price.mode) and _time(price) < (1 - _WORTH) * _time(best):
                best = price
        return best

    @property
    def trials(self) -> list[ModePrice]:
        """The allowed modes that are worth a trial against the choice."""
        return [price for price in self.prices if self.is_allowed(price.mode) and self._may_beat(price)]

    def is_allowed(self, mode: Mode) -> bool:
        """Return whether a mode may be chosen, or tried. Exact ones always may."""
        return isinstance(mode, Synchronous) or kind_of(mode) in self.case.allow

    def _may_beat(self, price: ModePrice) -> bool:
        """Whether a trial of a mode is worth it: its estimate is shorter than the choice's, or its step without an estimate."""
        if not is_trial(price.mode):
            return False
        chosen = self.chosen
        if price.time is None:
            return price.pace.seconds < (1 - _WORTH) * chosen.pace.seconds
        return price.time < (1 - _WORTH) * _time(chosen)

    def reasons(self) -> Iterator[str]:
        """Yield why the choice is as it is, a sentence each."""
        chosen, exact = self.chosen, self.exact
        above = chosen.pace.seconds / self.capacity - 1
        if chosen is not exact:
            bits = "the same bits" if chosen.is_exact else "other bits"
            yield f"{chosen.mode} takes {1 - _time(chosen) / _time(exact):.1%} less time to a loss than exact, {bits}"
        elif above <= _WORTH:
            yield "exact keeps all replicas busy already"
        else:
            yield f"no other mode that is allowed and needs no trial takes {_WORTH:.0%} less time to a loss than exact"
        if chosen.is_exact and above > _WORTH:
            yield f"its update is {above:.1%} longer than if all replicas were busy all the time, which no exact mode beats"
        for price in self.prices:
            if isinstance(price.mode, Deadline) and price is not chosen:
                yield from self._of_deadline(price)
            elif self._may_beat(price):
                then = "a trial decides" if self.is_allowed(price.mode) else "not allowed"
                yield f"{price.mode}: {self._estimate(price)}; {then}"

    def _of_deadline(self, price: ModePrice) -> Iterator[str]:
        """Yield why a deadline is not chosen."""
        less = 1 - _time(price) / _time(self.chosen)
        if not self.is_allowed(price.mode) and less > _WORTH:
            yield f"{price.mode} would take {less:.1%} less, with other bits, and is not allowed"

    def _estimate(self, price: ModePrice) -> str:
        """Return what is known of a mode before a trial."""
        if price.time is None:
            ratio = price.pace.seconds / self.chosen.pace.seconds
            return f"a step takes {ratio:.3f} of the choice's; no formula says how the loss falls"
        return f"perhaps {1 - price.time / _time(self.chosen):.1%} less; what old gradients do to a model no formula says"

    def to_json(self) -> dict[str, Any]:
        """Return the case, all modes, the choice with its reasons, the bound, and what STAR's rules say, as JSON values."""
        return {
            "case": self.case.to_json(),
            "modes": [price.to_json(self.exact) for price in self.prices],
            "choice": str(self.chosen.mode),
            "trials": [str(price.mode) for price in self.trials],
            "reasons": [*self.reasons()],
            "capacity": self.capacity,
            "star": self.star(),
        }

    def star(self) -> dict[str, Any]:
        """Return what STAR's rules say of the lasting times, as JSON values. Groups differ by a sixth of the usual step."""
        times = [self.case.seconds * factor for factor in self.case.factors]
        return dict(star_references(times, self.case.phi, self.case.batch, self.case.seconds / 6))


def _time(price: ModePrice) -> float:
    assert price.time is not None, f"{price.mode} has a formula"
    return price.time
