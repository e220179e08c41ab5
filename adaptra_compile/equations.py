"""The bubble equations: how many forwards each stage must run ahead so that a slow link costs its delay once, not N times.

The model is that of the Adaptra paper (arXiv 2504.19232), in its symbols:

======================  ==================================================================================================
``N``, ``S``            microbatches, stages
``x_i``                 forwards that stage i runs before its first backward (warm-up)
``Delta_i``             slackness of edge i (between stages i and i+1), x_i - x_{i+1}
``tF_i tB_i tW_i``      durations of F, I (the paper's B) and W on stage i
``cF_i``, ``cB_i``      what one message costs on edge i, forward and backward: latency + occupancy. The paper has one c_i
                        for both and writes 2 c_i where we write cF_i + cB_i
``A_i``                 most microbatches that may be in flight on stage i (the paper's floor(M / M_F))
``h_i d_i r_i``         earliest start of the first F on stage i; from the end of an F on stage i to the earliest start of its
                        I there; from the end of the last I on stage i to the earliest end of the step
======================  ==================================================================================================

Each equation is written once, below, as a sympy expression; what computes with it is compiled from it on first use, and what
explains a plan prints it. Importing this module doesn't import sympy.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from adaptra.cost import CostModel
from adaptra.errors import PlanError


@dataclass(frozen=True, slots=True)
class Equation:
    """One equation of the model.

    Attributes:
        title: What it is about, for people.
        source: Where it comes from.
        expression: The sympy relation or expression.
        arguments: Its symbols in the order in which :attr:`evaluate` takes their values.
    """

    title: str
    source: str
    expression: Any
    arguments: tuple[Any, ...]

    @property
    def text(self) -> str:
        """The equation as plain text."""
        return str(self.expression)

    def with_values(self, *values: float) -> str:
        """The equation as plain text, its values in the place of its symbols."""
        text = self.text
        given = {str(symbol): f"{value:g}" for symbol, value in zip(self.arguments, values, strict=True)}
        return re.sub(r"[A-Za-z]+(?:_(?:\{[^}]*\}|\w+))?", lambda match: given.get(match[0], match[0]), text)

    def evaluate(self, *values: float) -> Any:
        """The value of the expression, or the truth of the relation, in plain floating-point arithmetic."""
        return _compile(self)(*values)


@functools.cache
def _compile(equation: Equation) -> Callable[..., Any]:
    import sympy

    return sympy.lambdify(equation.arguments, equation.expression, modules="math")


@dataclass(frozen=True, slots=True)
class Equations:
    """All equations of the model; :func:`equations` makes the one instance.

    Attributes:
        slackness: Delta_i = x_i - x_{i+1}. Definition in the paper.
        monotone: x_i >= x_{i+1} in every valid schedule. The paper's lemma.
        no_cascade: tF_i + tB_i + cF_i + cB_i <= Delta_i (tF_{i+1} + tB_{i+1}): no bubble cascades over edge i. The paper's
            condition for unequal times, its 2 c_i split into the two directions.
        needed_slack: The least real Delta_i that meets ``no_cascade``, solved from it.
        warm_up_slack: The whole Delta_i of the paper's adaptation: at least 2, and no more than N.
        fill_slack: The Delta_i of the paper's published code, which lets the fill of the pipeline run ahead of the delay:
            ceil(c_i / tF_i) + 2 with c_i the mean of the directions.
        steady_slack: The Delta_i that a steady state needs when W fills the gaps: the window of Delta_i microbatches then lasts
            tF + tB + tW each. Own; ``(2t + 2c) / 3t`` for equal times.
        threshold: The delay c_i up to which slackness hides all but one passing of it, for equal op times t. The paper's
            theorem.
        excess: How much longer a step takes with delay c_i on one edge, for equal op times t: c_i within the threshold, and
            beyond it 2 N / (Delta_i + 1) for every unit more. The paper states the second case up to a constant; the slope is
            what its own simulated figures show, and this form reproduces them exactly.
        budget: x_i <= min(A_i, N): forwards in warm-up are in flight. From the paper's memory model.
        bound_load, bound_drain, bound_chain, bound_memory, bound_link_forward, bound_link_backward: No plan's makespan is less
            than these, on any stage i. The stage's work; its input gradients and the way home of the last one; the first
            microbatch's round trip and the chain of input gradients; round trips of A_i microbatches each; the messages of
            an edge, one after the other.
    """

    slackness: Equation
    monotone: Equation
    no_cascade: Equation
    needed_slack: Equation
    warm_up_slack: Equation
    fill_slack: Equation
    steady_slack: Equation
    threshold: Equation
    excess: Equation
    budget: Equation
    bound_load: Equation
    bound_drain: Equation
    bound_chain: Equation
    bound_memory: Equation
    bound_link_forward: Equation
    bound_link_backward: Equation


@functools.cache
def equations() -> Equations:
    """The equations, built on the first call."""
    import sympy

    def positive(names: str) -> tuple[Any, ...]:
        return sympy.symbols(names, nonnegative=True)

    f, b, w, f_next, b_next, w_next = positive("tF_i tB_i tW_i tF_{i+1} tB_{i+1} tW_{i+1}")
    x, x_next, delta, count = sympy.symbols("x_i x_{i+1} Delta_i N", integer=True, nonnegative=True)
    c_forward, c_backward, c, t = positive("cF_i cB_i c_i t")
    limit = sympy.Symbol("A_i", integer=True, positive=True)
    h, d, r, r_next, d_next, o_forward, o_backward = positive("h_i d_i r_i r_{i+1} d_{i+1} oF_i oB_i")

    window = f_next + b_next
    turn = f + b + c_forward + c_backward
    no_cascade = sympy.Le(turn, delta * window)
    real_slack = sympy.Symbol("Delta_i", nonnegative=True)
    (needed,) = sympy.solve(sympy.Eq(turn, real_slack * window), real_slack)
    needed_times = (f, b, c_forward, c_backward, f_next, b_next)
    threshold = (delta - 1) * t
    trips = sympy.floor((count - 1) / limit) + 1
    round_trip = f + d + b
    return Equations(
        slackness=Equation("slackness", "paper, definition", sympy.Eq(delta, x - x_next), (delta, x, x_next)),
        monotone=Equation("warm-up never grows downstream", "paper, lemma", sympy.Ge(x, x_next), (x, x_next)),
        no_cascade=Equation("no cascading bubble", "paper, condition for unequal times", no_cascade, (*needed_times, delta)),
        needed_slack=Equation("needed slackness", "solved from the condition", needed, needed_times),
        warm_up_slack=Equation(
            "slackness chosen",
            "paper, adaptation",
            sympy.Min(count, sympy.Max(sympy.ceiling(needed), 2)),
            (*needed_times, count),
        ),
        fill_slack=Equation(
            "slackness of a fast fill",
            "paper's published code",
            sympy.Min(count, sympy.ceiling((c_forward + c_backward) / (2 * f)) + 2),
            (f, c_forward, c_backward, count),
        ),
        steady_slack=Equation(
            "slackness of a steady state",
            "own",
            turn / (window + w_next),
            (*needed_times, w_next),
        ),
        threshold=Equation("delay that slackness hides", "paper, theorem", threshold, (delta, t)),
        excess=Equation(
            "excess of a delayed step",
            "paper, theorem; slope from its simulated figures",
            sympy.Piecewise((c, c <= threshold), (threshold + 2 * count / (delta + 1) * (c - threshold), True)),
            (c, delta, count, t),
        ),
        budget=Equation("memory budget", "paper, memory model", sympy.Le(x, sympy.Min(limit, count)), (x, limit, count)),
        bound_load=Equation("load of stage i", "lower bound", h + count * (f + b + w), (h, f, b, w, count)),
        bound_drain=Equation("drain of stage i", "lower bound", h + count * (f + b) + r, (h, f, b, r, count)),
        bound_chain=Equation("chain over stage i", "lower bound", h + round_trip + (count - 1) * b + r, (h, f, d, b, r, count)),
        bound_memory=Equation("memory of stage i", "lower bound", h + trips * round_trip + r, (h, f, d, b, r, count, limit)),
        bound_link_forward=Equation(
            "messages forward over edge i",
            "lower bound",
            h + f + count * o_forward + (c_forward - o_forward) + d_next + f_next + b_next + r_next,
            (h, f, o_forward, c_forward, f_next, d_next, b_next, r_next, count),
        ),
        bound_link_backward=Equation(
            "messages backward over edge i",
            "lower bound",
            h + f + c_forward + f_next + d_next + b_next + count * o_backward + (c_backward - o_backward) + b + r,
            (h, f, c_forward, f_next, d_next, b_next, o_backward, c_backward, b, r, count),
        ),
    )


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Warm-up counts and slackness solved from the equations.

    Attributes:
        x: Per stage, the forwards before its first backward. Non-increasing, 1 on the last stage, never above ``limit``.
        slack: Per edge, x_i - x_{i+1}.
        needed: Per edge, the real slackness below which a bubble cascades (``needed_slack``); infinite over an edge whose lower
            stage takes no time at all.
        limit: Per stage, min(A_i, N).
    """

    x: tuple[int, ...]
    slack: tuple[int, ...]
    needed: tuple[float, ...]
    limit: tuple[int, ...]

    @property
    def short(self) -> tuple[int, ...]:
        """The edges that get less slackness than they need, because the budget or N is too small."""
        return tuple(edge for edge, (given, needed) in enumerate(zip(self.slack, self.needed, strict=True)) if given < needed)


class SlackRule(Enum):
    """Which equation decides how much slackness an edge asks for."""

    NO_CASCADE = "no cascade"
    """``warm_up_slack``: no bubble cascades. The paper's."""
    FILL = "fill"
    """``fill_slack``: more microbatches in flight, a faster fill."""
    STEADY = "steady"
    """``steady_slack``: as few microbatches in flight as a steady state needs, a slower fill."""


def warm_up(
    cost: CostModel,
    microbatches: int,
    in_flight_limit: int | Sequence[int] | None = None,
    rule: SlackRule = SlackRule.NO_CASCADE,
) -> WarmUp:
    """Solve the equations for the warm-up counts of all stages.

    From the last stage, whose count is 1, every edge adds the slackness it needs. Where that exceeds a stage's limit, the edges
    behind it give up slackness one by one, always the edge with the most to spare.

    Args:
        cost: Times of stages and edges.
        microbatches: N.
        in_flight_limit: A_i, one number for all stages or one per stage; None for no limit.
        rule: Which equation decides how much slackness an edge asks for.

    Raises:
        PlanError: A limit is below 1, or there is not one per stage.
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
    """The slackness that a rule asks for; all microbatches where a stage takes no time and its equation divides by zero."""
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
            return max(1, math.ceil(model.steady_slack.evaluate(*times, weight_grad)))


def _fit(slack: list[int], needed: Sequence[float], stage: int, limit: int) -> None:
    """Take slackness from the edges behind ``stage`` until its warm-up count is within the limit."""
    surplus = 1 + sum(slack[stage:]) - limit
    for least in (1, 0):
        while surplus > 0:
            spare = [edge for edge in range(stage, len(slack)) if slack[edge] > least]
            if not spare:
                break
            edge = max(spare, key=lambda edge: (slack[edge] - needed[edge], -edge))
            slack[edge] -= 1
            surplus -= 1


def in_flight_limits(given: int | Sequence[int] | None, stages: int, microbatches: int) -> tuple[int, ...]:
    """One limit of microbatches in flight per stage from a number for all, one number each, or None for no limit.

    Raises:
        PlanError: A limit is below 1, or there is not one per stage.
    """
    if given is None:
        return (microbatches,) * stages
    limits = (given,) * stages if isinstance(given, int) else tuple(given)
    if len(limits) != stages:
        raise PlanError(f"memory: expected one number or {stages}, one per stage, got {len(limits)}")
    for stage, limit in enumerate(limits):
        if limit < 1:
            raise PlanError(
                f"memory: stage {stage} may keep {limit} microbatches in flight: the smallest budget that works is 1"
            )
    return limits


def edge_times(cost: CostModel, edge: int) -> tuple[float, float, float, float, float, float]:
    """tF_i, tB_i, cF_i, cB_i, tF_{i+1}, tB_{i+1} of an edge."""
    return (
        cost.forward[edge],
        cost.input_grad[edge],
        cost.latency_forward[edge] + cost.occupancy_forward[edge],
        cost.latency_backward[edge] + cost.occupancy_backward[edge],
        cost.forward[edge + 1],
        cost.input_grad[edge + 1],
    )


def excess_delay(delay: float, slack: int, microbatches: int, duration: float) -> float:
    """How much longer a step becomes when one edge of slackness ``slack`` is delayed by ``delay`` in each direction.

    All ops last ``duration``. Within (slack - 1) · duration the delay is paid once, beyond it 2N / (slack + 1) times.
    """
    return float(equations().excess.evaluate(delay, slack, microbatches, duration))
