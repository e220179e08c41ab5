"""Warm-up counts and slackness, solved from :mod:`adaptra.equations.bubble` for given delays, stage times and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from adaptra.equations.bubble import equations
from adaptra.errors import PlanError
from adaptra.simulation.cost import CostModel


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Warm-up counts and slackness solved from the equations.

    Attributes:
        x: Per stage, the forwards before its first backward. Non-increasing, 1 on the last stage, never above ``limit``.
        slack: Per edge, x_i - x_{i+1}.
        needed: Per edge, the real slackness below which a bubble cascades (``needed_slack``). It is infinite if the edge's
            later stage takes no time.
        limit: Per stage, min(A_i, N).
    """

    x: tuple[int, ...]
    slack: tuple[int, ...]
    needed: tuple[float, ...]
    limit: tuple[int, ...]


class SlackRule(Enum):
    """The equation for the slackness of an edge."""

    NO_CASCADE = "no cascade"
    """``warm_up_slack``: no bubble cascades. The paper's."""
    FILL = "fill"
    """``fill_slack``: more microbatches in flight, a faster fill."""
    STEADY = "steady"
    """``steady_slack``: as few microbatches in flight as a steady state allows, a slower fill."""


def warm_up(
    cost: CostModel,
    microbatches: int,
    in_flight_limit: int | Sequence[int] | None = None,
    rule: SlackRule = SlackRule.NO_CASCADE,
) -> WarmUp:
    """Solve the equations for the warm-up counts of all stages.

    From the last stage, whose count is 1, every edge adds the slackness it needs. If the sum exceeds a stage's limit, the edges
    after it give up slackness in steps of one. Each step takes it from the edge with the most to spare.

    Args:
        cost: Times of stages and edges.
        microbatches: N.
        in_flight_limit: A_i, one number for all stages or one per stage; None for no limit.
        rule: The equation for the slackness of an edge.

    Raises:
        PlanError: A limit is below 1, or the number of limits is not the number of stages.
    """
    stages = cost.stages
    limit = tuple(min(given, microbatches) for given in in_flight_limits(in_flight_limit, stages, microbatches))
    needed = [_needed(cost, edge) for edge in range(stages - 1)]
    slack = [min(microbatches, _asked(cost, edge, microbatches, rule)) for edge in range(stages - 1)]
    for stage in reversed(range(stages - 1)):
        _fit(slack, needed, stage, limit[stage])
    x = [1] * stages
    for edge in reversed(range(stages - 1)):
        x[edge] = x[edge + 1] + slack[edge]
    return WarmUp(tuple(x), tuple(slack), tuple(needed), limit)


def _needed(cost: CostModel, edge: int) -> float:
    *mine, forward_next, input_grad_next = edge_times(cost, edge)
    if forward_next + input_grad_next == 0.0:
        return math.inf if sum(mine) > 0.0 else 0.0
    return float(equations().needed_slack.evaluate(*mine, forward_next, input_grad_next))


def _asked(cost: CostModel, edge: int, microbatches: int, rule: SlackRule) -> int:
    """Return the slackness by a rule, or N if a stage takes no time and the equation divides by zero."""
    model, times = equations(), edge_times(cost, edge)
    weight_grad = cost.weight_grad[edge + 1]
    match rule:
        case SlackRule.NO_CASCADE:
            return microbatches if times[4] + times[5] == 0.0 else int(model.warm_up_slack.evaluate(*times, microbatches))
        case SlackRule.FILL:
            forward, _, latency, back, _, _ = times
            return microbatches if forward == 0.0 else int(model.fill_slack.evaluate(forward, latency, back, microbatches))
        case SlackRule.STEADY:
            if times[4] + times[5] + weight_grad == 0.0:
                return microbatches
            return max(1, math.ceil(min(model.steady_slack.evaluate(*times, weight_grad), microbatches)))


def _fit(slack: list[int], needed: Sequence[float], stage: int, limit: int) -> None:
    """Take slackness from the edges after ``stage`` until its warm-up count is within the limit."""
    surplus = 1 + sum(slack[stage:]) - limit
    for least in (1, 0):
        while surplus > 0:
            spare = [edge for edge in range(stage, len(slack)) if slack[edge] > least]
            if not spare:
                break
            edge = max(spare, key=lambda edge: (slack[edge] - needed[edge], -edge))
            slack[edge] -= 1
            surplus -= 1


def in_flight_limits(in_flight: int | Sequence[int] | None, stages: int, microbatches: int) -> tuple[int, ...]:
    """Return the limit of microbatches in flight of each stage, from one number, a number per stage, or None for no limit.

    Raises:
        PlanError: A limit is below 1, or the number of limits is not the number of stages.
    """
    if in_flight is None:
        return (microbatches,) * stages
    limits = (in_flight,) * stages if isinstance(in_flight, int) else tuple(in_flight)
    if len(limits) != stages:
        raise PlanError(f"in_flight: expected one number or {stages}, one per stage, got {len(limits)}")
    for stage, limit in enumerate(limits):
        if limit < 1:
            raise PlanError(
                f"in_flight: stage {stage} may keep {limit} microbatches in flight: the smallest limit that works is 1"
            )
    return limits


def edge_times(cost: CostModel, edge: int) -> tuple[float, float, float, float, float, float]:
    """Return tF_i, tB_i, cF_i, cB_i, tF_{i+1}, tB_{i+1} of an edge."""
    return (
        cost.forward[edge],
        cost.input_grad[edge],
        cost.latency_forward[edge] + cost.occupancy_forward[edge],
        cost.latency_backward[edge] + cost.occupancy_backward[edge],
        cost.forward[edge + 1],
        cost.input_grad[edge + 1],
    )
