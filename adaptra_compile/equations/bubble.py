"""The bubble equations: the warm-up forwards that each stage needs so that a slow link costs its delay once, not N times.

The model is that of the Adaptra paper (arXiv 2504.19232), in its symbols: :data:`SYMBOLS`.

Each equation is written once, below, as a sympy expression. Functions that compute with it are compiled from it on first use,
and explanations of a plan print it. The import of this module doesn't import sympy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

from adaptra.equations.equation import Equation

SYMBOLS: Final = {
    "N": "microbatches of a step",
    "x": "forwards that stage i runs before its first backward (warm-up)",
    "Delta": "slackness of edge i, which joins stages i and i+1: x_i - x_{i+1}",
    "tF": "time of F on stage i",
    "tB": "time of I, the input gradient, on stage i",
    "tW": "time of W, the weight gradient, on stage i",
    "cF": "time of one message forward on edge i: latency + occupancy",
    "cB": "time of one message backward on edge i: latency + occupancy",
    "oF": "occupancy: how long one message forward keeps edge i busy",
    "oB": "occupancy: how long one message backward keeps edge i busy",
    "A": "most microbatches that may be in flight on stage i",
    "h": "earliest start of the first F on stage i",
    "d": "from the end of an F on stage i to the earliest start of its I there",
    "r": "from the end of the last I on stage i to the earliest end of the step",
}
"""The meaning of each symbol, without its index.

The paper has one c_i for both directions; its 2 c_i is cF_i + cB_i here. Its A_i is floor(M / M_F).
"""


@dataclass(frozen=True, slots=True)
class Equations:
    """All equations of the model; :func:`equations` makes the one instance.

    Attributes:
        slackness: Delta_i = x_i - x_{i+1}. The paper's definition.
        no_cascade: tF_i + tB_i + cF_i + cB_i <= Delta_i (tF_{i+1} + tB_{i+1}): no bubble cascades over edge i. The paper's
            condition for unequal times, with its 2 c_i split into the two directions.
        needed_slack: The least real Delta_i that satisfies ``no_cascade``, solved from it.
        warm_up_slack: The whole Delta_i of the paper's adaptation: at least 2, and no more than N.
        fill_slack: The Delta_i of the paper's published code: ceil(c_i / tF_i) + 2 with c_i the mean of the directions. It lets
            the fill of the pipeline run ahead of the delay.
        steady_slack: The Delta_i that a steady state needs when W fills the gaps: the window of Delta_i microbatches then lasts
            tF + tB + tW each. Own; ``(2t + 2c) / 3t`` for equal times.
        budget: x_i <= min(A_i, N): forwards in warm-up are in flight. From the paper's memory model.
        bound_load, bound_drain, bound_chain, bound_memory, bound_link_forward, bound_link_backward: Lower bounds of the
            makespan, on any stage or edge i. Load: the stage's work. Drain: its input gradients, then the last one's way to
            stage 0. Chain: the first microbatch's round trip, then the input gradients. Memory: round trips of A_i
            microbatches each. Links: the messages of an edge, one after the other.
    """

    slackness: Equation
    no_cascade: Equation
    needed_slack: Equation
    warm_up_slack: Equation
    fill_slack: Equation
    steady_slack: Equation
    budget: Equation
    bound_load: Equation
    bound_drain: Equation
    bound_chain: Equation
    bound_memory: Equation
    bound_link_forward: Equation
    bound_link_backward: Equation


@functools.cache
def equations() -> Equations:
    """Return the equations, which are built on the first call."""
    import sympy

    def positive(names: str) -> tuple[Any, ...]:
        return sympy.symbols(names, nonnegative=True)

    f, b, w, f_next, b_next, w_next = positive("tF_i tB_i tW_i tF_{i+1} tB_{i+1} tW_{i+1}")
    x, x_next, delta, count = sympy.symbols("x_i x_{i+1} Delta_i N", integer=True, nonnegative=True)
    c_forward, c_backward = positive("cF_i cB_i")
    limit = sympy.Symbol("A_i", integer=True, positive=True)
    h, d, r, r_next, d_next, o_forward, o_backward = positive("h_i d_i r_i r_{i+1} d_{i+1} oF_i oB_i")

    window = f_next + b_next
    turn = f + b + c_forward + c_backward
    no_cascade = sympy.Le(turn, delta * window)
    real_slack = sympy.Symbol("Delta_i", nonnegative=True)
    (needed,) = sympy.solve(sympy.Eq(turn, real_slack * window), real_slack)
    needed_times = (f, b, c_forward, c_backward, f_next, b_next)
    trips = sympy.floor((count - 1) / limit) + 1
    round_trip = f + d + b
    return Equations(
        slackness=Equation("slackness", "paper, definition", sympy.Eq(delta, x - x_next), (delta, x, x_next)),
        no_cascade=Equation("no cascading bubble", "paper, condition for unequal times", no_cascade, (*needed_times, delta)),
        needed_slack=Equation("needed slackness", "solved from the condition", needed, needed_times),
        warm_up_slack=Equation(
            "slackness chosen",
            "paper, adaptation",
            sympy.ceiling(sympy.Min(count, sympy.Max(needed, 2))),
            (*needed_times, count),
        ),
        fill_slack=Equation(
            "slackness of a fast fill",
            "paper's published code",
            sympy.ceiling(sympy.Min(count, (c_forward + c_backward) / (2 * f) + 2)),
            (f, c_forward, c_backward, count),
        ),
        steady_slack=Equation(
            "slackness of a steady state",
            "own",
            turn / (window + w_next),
            (*needed_times, w_next),
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
