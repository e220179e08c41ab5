"""What is wrong in a job, as far as another mode of synchronisation could help: slow workers, and sums that steps wait for.

Workers are slow for long, or by turns: then each step waits for another one. A trial takes many steps. So it is due only where
something is wrong, and once for each such regime. It is due again when a worker becomes slow or is slow no more, or when turns
or sums begin or cease to cost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from adaptra.checks import is_finite
from adaptra.errors import ControlError

LEAST: Final = 0.1
"""By this share a worker is slow, or a step longer for its sums or for turns. Less is noise, and no trial would pay for it."""


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """What one worker's last steps have taken.

    Attributes:
        place: Its place in its pipeline, which others with the same stages have too.
        by_step: Seconds of its ops for a microbatch, in each step. They don't depend on who computes how many.
        step: Seconds of a step, the median.
        exposed: Seconds by which the sum over replicas delayed the next step, the median; None where there is none in this
            mode.
    """

    place: int
    by_step: tuple[float, ...]
    step: float
    exposed: float | None

    @property
    def busy(self) -> float:
        """Seconds of its ops for a microbatch, the median."""
        return median(self.by_step)

    def encode(self) -> str:
        """Return what a rank tells the others."""
        return json.dumps([self.place, self.by_step, self.step, self.exposed])

    @staticmethod
    def decode(text: str) -> WorkerTimes:
        """Read what :meth:`encode` has written.

        Raises:
            ControlError: It can't be read.
        """
        match json.loads(text):
            case [int(place), [_, *_] as by_step, step, exposed] if (
                all(map(is_finite, by_step)) and is_finite(step) and (exposed is None or is_finite(exposed))
            ):
                return WorkerTimes(place, tuple(by_step), step, exposed)
            case other:
                raise ControlError(f"times of a worker: {other!r:.80}: expected a place, times by step, and two times")


@dataclass(frozen=True, slots=True)
class Regime:
    """What is wrong at one moment, the same on all ranks.

    Attributes:
        slowness: By rank, its time of a microbatch over that of the fastest worker with the same stage.
        exposed: The share of a step by which sums delay the next one, of the stage with the largest; None where not known.
            Of a stage it is that of the replica that comes last, which waits for nobody.
        turns: By which share steps are longer since workers are slow by turns, of the stage with the largest. The slowest
            worker of each step is compared with the one that is the slowest by medians.
    """

    slowness: tuple[float, ...]
    exposed: float | None
    turns: float

    @staticmethod
    def of(workers: Sequence[WorkerTimes]) -> Regime:
        """Return the regime that the times of all workers of a job show, by rank."""
        places: dict[int, list[WorkerTimes]] = {}
        for one in workers:
            places.setdefault(one.place, []).append(one)
        fastest = {place: min(one.busy for one in alike) for place, alike in places.items()}
        shares = [
            min(one.exposed / one.step for one in alike if one.exposed is not None)
            for alike in places.values()
            if all(one.exposed is not None for one in alike)
        ]
        slowness = tuple(one.busy / fastest[one.place] for one in workers)
        return Regime(slowness, max(shares, default=None), max(map(_turns, places.values())))

    @property
    def is_wrong(self) -> bool:
        """Whether another mode could help."""
        return max(self.slowness) > 1 + LEAST or self.turns > LEAST or (self.exposed is not None and self.exposed > LEAST)

    def differs(self, before: Regime) -> bool:
        """Return whether something has begun or ceased to be wrong since, or is wrong by another amount.

        By how much turns make steps longer varies with the steps seen, so only a begin and an end count there.
        """
        pairs = zip(self.slowness, before.slowness, strict=True)
        slower = any(max(pair) > (1 + LEAST) ** 2 * min(pair) for pair in pairs)
        known = self.exposed is not None and before.exposed is not None
        by_sums = known and abs((self.exposed or 0.0) - (before.exposed or 0.0)) > 2 * LEAST
        by_turns = self.turns < LEAST / 2 if before.turns > LEAST else self.turns > 2 * LEAST
        return slower or by_sums or by_turns

    def is_due(self, tried: Regime | None) -> bool:
        """Return whether a trial is due, given the regime of the last one; None before the first."""
        return self.is_wrong if tried is None else self.differs(tried)

    def __str__(self) -> str:
        slow = [f"rank {rank} {one:.3g}×" for rank, one in enumerate(self.slowness) if one > 1 + LEAST]
        turns = [f"steps {self.turns:.0%} longer by turns"] if self.turns > LEAST else []
        sums = [f"sums {self.exposed:.0%} of a step"] if self.exposed is not None and self.exposed > LEAST else []
        return ", ".join([*slow, *turns, *sums]) or "nothing is slow"


def times_of(place: int, steps: Sequence[tuple[float, float, float | None]]) -> WorkerTimes:
    """Return the times of a worker from its last steps, each as seconds for a microbatch, of the step, and exposed."""
    busy, seconds, exposed = zip(*steps, strict=True)
    known = [one for one in exposed if one is not None]
    return WorkerTimes(place, tuple(busy), median(seconds), median(known) if known else None)


def _turns(alike: Sequence[WorkerTimes]) -> float:
    """Return by which share steps are longer than the medians of these workers say, without the longest step.

    What comes once is no regime: a first step, or a collection of garbage.
    """
    by_step = zip(*(one.by_step[::-1] for one in alike), strict=False)  # the last steps of all
    slowest = sorted(map(max, by_step))[:-1]
    return fmean(slowest) / max(one.busy for one in alike) - 1 if slowest else 0.0
