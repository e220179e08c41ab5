"""The equations of synchronisation modes: seconds of an update times updates needed, and the noise scale of gradients.

Sources: McCandlish et al. (2018) for the noise scale and the updates that a batch needs. STAR (2025) for its rules, which are
references here. Levin and May (1976) for what age costs. The rest is own. The import of this module doesn't import sympy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from adaptra.equations.equation import Equation

SYNCHRONY_SYMBOLS: Final = {
    "N": "replicas",
    "x": "replicas whose gradients are in an update",
    "b": "samples of one replica's step",
    "B": "samples in an update",
    "phi": "gradient noise scale, in samples",
    "tau": "age of gradients: updates since the parameters that they were computed with",
    "T": "seconds of an update",
    "t": "seconds of a replica's step: t_1 of the fastest, t_x of the x-th fastest, t_N of the slowest",
    "h": "seconds between two ends of a step, of any replica: 1/sum(1/t_i)",
    "e": "seconds for which an exchange of gradients keeps an update waiting",
    "k": "steps between two exchanges",
    "A": "mean squared norm of the replicas' gradients",
    "G": "squared norm of the mean of all replicas' gradients",
    "V": "trace of the covariance of the gradient of one sample",
    "g": "squared norm of the gradient without noise",
}
"""The meaning of each symbol, without its index."""


@dataclass(frozen=True, slots=True)
class SynchronyEquations:
    """All equations of the model; :func:`synchrony_equations` makes the one instance.

    The unit of updates is what a batch without noise and without age would need. The learning rate is the best of each mode.

    Attributes:
        staleness: The largest stable rate of gradient descent, over that with gradients of this age. It is 1 at age 0, and N at
            least for the N - 1 updates of age that asynchronous replicas have.
        updates: Noise costs no more with age, since it asks for small rates anyway.
        time: Seconds of an update times updates.
        exact: An update waits for the slowest replica, and for the exchange.
        capacity: No exact update is shorter: all replicas are busy, and share the work by speed in fractions of microbatches.
        local: A step between exchanges, if all replicas are equally fast.
        star_interval: Seconds of an update by the second of STAR's rules. By the first they are t_x, by the third simulated.
        star_cost: What STAR compares. It has no term for age.
        star_limited: The same where the learning rate limits and noise does not, as STAR divides the sum of x gradients by N.
        noise: V, solved from the expectations of A and G. Unbiased.
        signal: g, solved from the same. Unbiased, so it may be negative.
        noise_scale: The samples at which noise and gradient are equally large.
    """

    staleness: Equation
    updates: Equation
    time: Equation
    exact: Equation
    capacity: Equation
    local: Equation
    star_interval: Equation
    star_cost: Equation
    star_limited: Equation
    noise: Equation
    signal: Equation
    noise_scale: Equation


@functools.cache
def synchrony_equations() -> SynchronyEquations:
    """Return the equations, which are built on the first call."""
    import sympy

    replicas, reports, samples, batch = sympy.symbols("N x b B", positive=True)
    phi, age, waiting = sympy.symbols("phi tau e", nonnegative=True)
    seconds, step, between, steps = sympy.symbols("T t h k", positive=True)
    first, xth, last = sympy.symbols("t_1 t_x t_N", positive=True)
    terms, mean, variance, signal = sympy.symbols("A G V g", real=True)

    staleness = 1 / sympy.sin(sympy.pi / (4 * age + 2))
    updates = staleness + phi / batch
    cost = 1 + phi / (reports * samples)
    # The mean of P independent terms of b samples each has P times their samples, and so a share of their variance.
    solved = sympy.solve(
        [
            sympy.Eq(terms, signal + variance / samples),
            sympy.Eq(mean, signal + variance / (replicas * samples)),
        ],
        [variance, signal],
        dict=True,
    )[0]
    return SynchronyEquations(
        staleness=Equation("what age costs", "Levin and May; use own", staleness, (age,)),
        updates=Equation("updates needed", "McCandlish et al.; age own", updates, (age, phi, batch)),
        time=Equation("time to loss", "own", seconds * updates, (seconds, age, phi, batch)),
        exact=Equation("seconds of an exact update", "definition", last + waiting, (last, waiting)),
        capacity=Equation(
            "no exact update is shorter", "lower bound", replicas * between + waiting, (replicas, between, waiting)
        ),
        local=Equation("seconds of a local step", "definition", step + waiting / steps, (step, waiting, steps)),
        star_interval=Equation(
            "seconds of an update, between asynchronous and the slowest",
            "STAR, its second rule",
            between + (last - between) * (xth - first) / (last - first),
            (between, first, xth, last),
        ),
        star_cost=Equation("cost of x-order", "STAR", seconds * cost, (seconds, phi, reports, samples)),
        star_limited=Equation(
            "cost of x-order where the learning rate limits",
            "STAR's division by N",
            seconds * replicas / reports,
            (seconds, replicas, reports),
        ),
        noise=Equation(
            "noise", "McCandlish et al., appendix A", sympy.factor(solved[variance]), (terms, mean, replicas, samples)
        ),
        signal=Equation(
            "gradient without noise", "McCandlish et al., appendix A", sympy.factor(solved[signal]), (terms, mean, replicas)
        ),
        noise_scale=Equation("gradient noise scale", "McCandlish et al.", variance / signal, (variance, signal)),
    )
