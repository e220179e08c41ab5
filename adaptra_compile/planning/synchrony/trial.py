"""The decision of a trial: some steps of each mode from the same state, compared by how fast the loss falls.

Of local steps and stale gradients no formula says how the loss falls. So it is measured: in each round every mode makes the
same number of steps, from the same state and on the same batches. Its rate is the loss that it has taken off in a second. A
mode replaces exact updates only where its rate was higher beyond chance: the interval of the difference, round by round, is
above zero. So exact wins ties, and whatever the noise of times and of data can't tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

from adaptra.planning.synchrony.noise_scale import students_t

CONFIDENCE: Final = 0.95
"""The confidence at which a mode must be faster than exact updates."""

LEAST_ROUNDS: Final = 3
"""Fewer rounds have an interval that says nothing."""


@dataclass(frozen=True, slots=True)
class TrialRound:
    """One round of a mode.

    Attributes:
        seconds: For how long the slowest rank made its steps.
        before, after: The loss over the round's batches, of all replicas.
    """

    seconds: float
    before: float
    after: float

    @property
    def rate(self) -> float:
        """The loss taken off in a second."""
        return (self.before - self.after) / self.seconds


@dataclass(frozen=True, slots=True)
class TriedMode:
    """The rounds of one mode.

    Attributes:
        name: The mode, for people.
        rounds: Its rounds, in the order of those of other modes.
    """

    name: str
    rounds: tuple[TrialRound, ...]

    @property
    def rate(self) -> float:
        """The mean loss taken off in a second."""
        return fmean(one.rate for one in self.rounds)

    def gain(self, exact: TriedMode) -> tuple[float, float]:
        """Return by how much its rate is above that of exact updates, and half of the interval of this.

        Neither is a number where a loss was not finite.
        """
        gains = [own.rate - other.rate for own, other in zip(self.rounds, exact.rounds, strict=True)]
        if not all(map(math.isfinite, gains)):  # training has diverged
            return math.nan, math.nan
        return fmean(gains), students_t(CONFIDENCE, len(gains) - 1) * stdev(gains) / math.sqrt(len(gains))

    def __str__(self) -> str:
        seconds, before, after = (fmean(getattr(one, name) for one in self.rounds) for name in ("seconds", "before", "after"))
        return f"{self.name} {seconds:.3g} s, loss {before:.6g} to {after:.6g}, {self.rate:.3g} a second"


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial has measured, and what it has decided.

    Attributes:
        modes: The modes; exact is the first one.
        steps: The steps of each round.
        chosen: The index of the mode with which the job goes on.
        regime: What was slow before, for people.
    """

    modes: tuple[TriedMode, ...]
    steps: int
    chosen: int
    regime: str = ""

    def __str__(self) -> str:
        exact, *others = self.modes
        rounds = len(exact.rounds)
        gains = [(one, *one.gain(exact)) for one in others]
        beside = "".join(f"; {one}, {gain:+.3g} ± {half:.2g} beside exact" for one, gain, half in gains)
        before = f"; before: {self.regime}" if self.regime else ""
        return f"{self.modes[self.chosen].name} goes on; {rounds} rounds of {self.steps} steps: {exact}{beside}{before}"


def choose(modes: Sequence[TriedMode]) -> int:
    """Return the index of the mode that takes off the most loss in a second; 0, exact, unless another is surely faster."""
    exact, *others = modes
    chosen, best = 0, -math.inf
    for number, mode in enumerate(others, start=1):
        gain, half = mode.gain(exact)
        if gain - half > 0 and mode.rate > best:  # false for what is not a number
            chosen, best = number, mode.rate
    return chosen
