"""Scenarios: what a pipeline might look like, and how likely that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

from adaptra.errors import PlanError
from adaptra.simulation.cost import CostModel

MOST_SCENARIOS: Final = 4096
"""More than this are taken for a mistake."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the pipeline might look like: its times, and how likely they are relative to the other scenarios.

    What microbatches hold and ranks may hold is the case's, not the scenario's.
    """

    cost: CostModel
    weight: float = 1.0


def delay_scenarios(cost: CostModel, delays: Mapping[tuple[int, int], Mapping[float, float]]) -> tuple[Scenario, ...]:
    """Every combination of independent delays of directed edges, the most usual case of uncertainty.

    Args:
        cost: What holds without added delay.
        delays: Per (sending stage, receiving stage), which delays may be added to its latency and the weight of each:
            ``{(1, 2): {0: 0.9, 60: 0.1}}``. For a low and a high delay of which nothing else is known, give both the weight 1.

    Raises:
        CaseError: An edge that does not exist, or a delay that is negative or not finite.
        PlanError: No delay for an edge, or more than ``MOST_SCENARIOS`` combinations.
    """
    if not all(delays.values()) or math.prod(map(len, delays.values())) > MOST_SCENARIOS:
        sizes = ", ".join(f"{source}→{destination}: {len(given)}" for (source, destination), given in delays.items())
        raise PlanError(f"delays {sizes}: expected at least one per edge and at most {MOST_SCENARIOS} combinations")
    found: list[Scenario] = []
    for combination in product(*(given.items() for given in delays.values())):
        slowed, weight = cost, 1.0
        for (source, destination), (delay, likelihood) in zip(delays, combination, strict=True):
            slowed = slowed.with_latency(source, destination, cost.latency(source, destination) + delay)
            weight *= likelihood
        found.append(Scenario(slowed, weight))
    return tuple(found)
