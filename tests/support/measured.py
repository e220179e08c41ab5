"""Costs as replicas measure them: with noise."""

from __future__ import annotations

import random
from dataclasses import replace

from adaptra.planning.routes.measured_jobs import UpdateSeconds
from adaptra.simulation.cost import CostModel

MEASURED = (
    *("forward", "input_grad", "weight_grad"),
    *("latency_forward", "latency_backward", "occupancy_forward", "occupancy_backward"),
)


def noisy(cost: CostModel, chance: random.Random, noise: float = 0.02) -> CostModel:
    """The costs, each off by at most this fraction."""
    return replace(
        cost,
        **{name: tuple(value * chance.uniform(1 - noise, 1 + noise) for value in getattr(cost, name)) for name in MEASURED},
    )


def seconds_of_updates(stages: int) -> UpdateSeconds:
    """STEP and REDUCE of 20 ms each, and as much for an accumulator that is handed over."""
    return UpdateSeconds((0.02,) * stages, (0.02,) * stages, 0.02)
