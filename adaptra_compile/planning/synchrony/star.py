"""The published rules of STAR (2025), as references: which x they choose by the predicted times of workers' steps.

Updates are predicted in three ways. None has a term for the age of gradients. By the third, asynchronous is chosen always,
slow workers or not. The first and the second avoid that by being approximations.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from adaptra.equations.synchrony import synchrony_equations
from adaptra.planning.synchrony.clock import groups_by_speed

_UPDATES: Final = 1000
"""Updates that the third rule simulates."""
_MOST_SIMULATED: Final = 64
"""With more workers the third rule is left out of the references: it simulates each x."""


class StarRule(Enum):
    """How STAR predicts the seconds of an update of x workers."""

    FASTEST = "fastest"
    """Its first rule: the time of the x-th fastest."""
    INTERPOLATED = "interpolated"
    """Its second: between asynchronous and the slowest, in proportion to the x-th fastest."""
    EVENTS = "events"
    """Its third: 1,000 updates are simulated, but for one worker and for all."""
    LIMITED = "limited"
    """The first, where the learning rate limits progress: STAR divides sums of x gradients by the number of all workers."""


@dataclass(frozen=True, slots=True)
class StarChoice:
    """What one rule says.

    Attributes:
        first: The first x whose cost is below that of x+1. STAR takes it.
        best: The x of the least cost; of several the largest.
        costs: The cost of each x, from 1 on.
    """

    first: int
    best: int
    costs: tuple[float, ...]

    def of_all(self, x: int) -> float:
        """Return the cost of x over that of all workers."""
        return self.costs[x - 1] / self.costs[-1]

    def to_json(self) -> dict[str, Any]:
        """Return the choices and their costs over that of all workers, as JSON values."""
        return {
            "first": self.first,
            "best": self.best,
            "first_of_exact": self.of_all(self.first),
            "best_of_exact": self.of_all(self.best),
        }


def star_choice(rule: StarRule, times: Sequence[float], phi: float, samples: float) -> StarChoice:
    """Return what a rule says of workers whose steps take these times, with so many samples each."""
    model, ordered, workers = synchrony_equations(), sorted(times), len(times)
    costs: list[float] = []
    for x in range(1, workers + 1):
        seconds = _seconds(rule, ordered, x)
        if rule is StarRule.LIMITED:
            costs.append(model.star_limited.evaluate(seconds, workers, x))
        else:
            costs.append(model.star_cost.evaluate(seconds, phi, x, samples))
    falling = (x for x in range(1, workers) if costs[x - 1] < costs[x])
    return StarChoice(next(falling, workers), min(range(workers, 0, -1), key=lambda x: costs[x - 1]), tuple(costs))


def star_groups(times: Sequence[float], phi: float, samples: float, gap: float) -> tuple[tuple[int, ...], float]:
    """Return the sizes of STAR's groups by speed, and their cost over that of all workers together.

    Args:
        times: The seconds of each worker's step.
        phi: The gradient noise scale, in samples.
        samples: The samples of one worker's step.
        gap: The largest difference within a group, in seconds.
    """
    model, groups = synchrony_equations(), groups_by_speed(times, gap)
    costs = [model.star_cost.evaluate(max(times[one] for one in group), phi, len(group), samples) for group in groups]
    together = model.star_cost.evaluate(max(times), phi, len(times), samples)
    return tuple(map(len, groups)), 1 / sum(1 / cost for cost in costs) / together


def star_references(times: Sequence[float], phi: float, samples: float, gap: float) -> Mapping[str, Any]:
    """Return what all rules say, as JSON values. Arguments are those of :func:`star_groups`."""
    sizes, cost = star_groups(times, phi, samples, gap)
    rules = [rule for rule in StarRule if rule is not StarRule.EVENTS or len(times) <= _MOST_SIMULATED]
    said = {rule.value: star_choice(rule, times, phi, samples).to_json() for rule in rules}
    return said | {"groups": {"sizes": [*sizes], "of_exact": cost}}


def _seconds(rule: StarRule, ordered: Sequence[float], x: int) -> float:
    fastest, xth, slowest = ordered[0], ordered[x - 1], ordered[-1]
    between = 1 / sum(1 / moment for moment in ordered)
    match rule:
        case StarRule.FASTEST | StarRule.LIMITED:
            return xth
        case StarRule.INTERPOLATED:
            if slowest == fastest:
                return slowest
            return synchrony_equations().star_interval.evaluate(between, fastest, xth, slowest)
        case StarRule.EVENTS:
            return between if x == 1 else slowest if x == len(ordered) else _simulated(ordered, x)


def _simulated(times: Sequence[float], x: int) -> float:
    """Return the mean seconds of an update of x workers, from the first of 1,000 on."""
    ends = [(moment, worker) for worker, moment in enumerate(times)]
    heapq.heapify(ends)
    now, waiting, updates = 0.0, list[int](), 0
    while updates < _UPDATES:
        now, worker = heapq.heappop(ends)
        waiting.append(worker)
        if len(waiting) == x:
            updates += 1
            for one in waiting:
                heapq.heappush(ends, (now + times[one], one))
            waiting.clear()
    return now / updates
