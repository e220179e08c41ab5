"""Scenarios: possible cost models of a pipeline and their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

from adaptra.errors import PlanError
from adaptra.simulation.cost import CostModel

MOST_SCENARIOS: Final = 4096
"""The most scenarios. More are refused."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One possible cost model, and its weight relative to the other scenarios.

    Only its times are used. Memory and memory limits are those of the case.
    """

    cost: CostModel
    weight: float = 1.0


def delay_scenarios(cost: CostModel, delays: Mapping[tuple[int, int], Mapping[float, float]]) -> tuple[Scenario, ...]:
    """Return every combination of independent delays of directed edges, the most usual case of uncertainty.

    Args:
        cost: The cost model without added delay.
        delays: Per (sending stage, receiving stage), the possible additions to its latency with their weights:
            ``{(1, 2): {0: 0.9, 60: 0.1}}``. If only a low and a high delay are known, give both the weight 1.

    Raises:
        CaseError: An edge does not exist, or a delay is negative or not finite.
        PlanError: An edge has no delay, or there are more than ``MOST_SCENARIOS`` combinations.
    """
    if not all(delays.values()) or math.prod(map(len, delays.values())) > MOST_SCENARIOS:
        sizes = ", ".join(f"{source}→{destination}: {len(given)}" for (source, destination), given in delays.items())
        raise PlanError(f"delays {sizes}: expected at least one per edge and at most {MOST_SCENARIOS} combinations")
    scenarios: list[Scenario] = []
    for combination in product(*(given.items() for given in delays.values())):
        slowed, weight = cost, 1.0
        for (source, destination), (delay, likelihood) in zip(delays, combination, strict=True):
            slowed = slowed.with_latency(source, destination, cost.latency(source, destination) + delay)
            weight *= likelihood
        scenarios.append(Scenario(slowed, weight))
    return tuple(scenarios)
