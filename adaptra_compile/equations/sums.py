"""The equations of a sum over ranks: what each algorithm takes when a rank is late, and from which delay on another one pays.

Sources: StragglAR (2025) for the times of a ring and of doubling; all others are own. Each is written once as sympy. The best
numbers of parts and of late ranks are solved by sympy. The import of this module doesn't import sympy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

from adaptra.equations.equation import Equation

SUM_SYMBOLS: Final = {
    "N": "ranks",
    "L": "late ranks, which own nothing",
    "D": "delay of the last rank behind the first",
    "s": "bytes of one rank's terms",
    "alpha": "time of a message without bytes",
    "beta": "time of a byte through a port; beta_r through the port of rank r, beta_n through the narrowest one",
    "C": "parts of the sum, each of s/C bytes",
    "k": "parts that each owner has",
    "K": "rounds in which the last part reaches all ranks: ceiling(log2 N); one less if the late rank adds too",
    "d": "arrival of rank r",
    "T": "water level: the time by which the ports together can carry all",
}
"""The meaning of each symbol, without its index. Index r numbers ranks. All times share one unit."""


@dataclass(frozen=True, slots=True)
class SumEquations:
    """All equations of the model; :func:`sum_equations` makes the one instance.

    Attributes:
        direct: All ranks own a part. A ring takes as long.
        chain: A fold from the first rank to the last, and the result's way back, of three ranks and two parts at least.
        chain_parts: The best number of parts for it, where the derivative of ``chain`` is zero.
        doubling: Neighbours, then pairs of neighbours and so on exchange whole sums.
        gather: Until the owners have the terms of each other, one late rank left out.
        merge: The late rank then sends each part to its owner, and the owners spread the results by doubling.
        merge_parts: The best number of parts for it.
        streamed_gather: As ``gather``, with L late ranks left out.
        streamed: The late ranks then send theirs, and each owner sends its results to all by itself.
        streamed_parts: The best number of parts of each owner.
        narrow: The same with nobody late: L ranks own nothing as their ports are narrow. All send at once. What takes longest
            is the owners' terms and results through their ports, or the results through a narrow one, behind the first part.
        critical_delay: From this delay on ``merge`` takes no longer than ``direct``.
        most_late: The most late ranks for which ``streamed`` takes no longer than ``direct``, solved from both.
        share: The share of the sum that rank r owns if all ports are busy until T. All shares together are 1.
        alone: No rank is done before its own terms have left its port.
    """

    direct: Equation
    chain: Equation
    chain_parts: Equation
    doubling: Equation
    gather: Equation
    merge: Equation
    merge_parts: Equation
    streamed_gather: Equation
    streamed: Equation
    streamed_parts: Equation
    narrow: Equation
    critical_delay: Equation
    most_late: Equation
    share: Equation
    alone: Equation


@functools.cache
def sum_equations() -> SumEquations:
    """Return the equations, which are built on the first call."""
    import sympy

    ranks, late, parts, each, spread = sympy.symbols("N L C k K", positive=True)
    delay, level, arrival = sympy.symbols("D T d_r", nonnegative=True)
    size, alpha, beta, port, narrow = sympy.symbols("s alpha beta beta_r beta_n", positive=True)
    link = (size, alpha, beta)

    def solved(expression: Any, symbol: Any) -> Any:
        """Return the one positive symbol for which the expression is zero."""
        (root,) = sympy.solve(expression, symbol)
        return root

    exchange = 2 * (ranks - 1) * (alpha + size * beta / ranks)
    chain = (2 * parts + 2 * ranks - 5) * (alpha + size * beta / parts)
    gather = (ranks - 2) * sympy.ceiling(parts / (ranks - 1)) * (alpha + size * beta / parts)
    merge = (parts + spread) * (alpha + size * beta / parts)
    message = alpha + size * beta / (each * (ranks - late))
    streamed_gather = each * (ranks - late - 1) * message
    streamed = (each + 1) * (ranks - 1) * message
    through_owners = each * (2 * ranks - late - 2) * message
    through_narrow = each * (ranks - late) * message.subs(beta, narrow)
    # Each part takes slope rounds, and steps are the rounds behind the last one.
    slope, steps = sympy.symbols("slope steps", positive=True)
    best = solved(sympy.diff((slope * parts + steps) * (alpha + size * beta / parts), parts), parts)
    return SumEquations(
        direct=Equation("direct, and a ring", "StragglAR for the ring", delay + exchange, (delay, ranks, *link)),
        chain=Equation("chain", "own", delay + chain, (delay, ranks, parts, *link)),
        chain_parts=Equation(
            "best parts of chain",
            "solved from chain",
            best.subs({slope: 2, steps: 2 * ranks - 5}),
            (ranks, *link),
        ),
        doubling=Equation("doubling", "StragglAR", delay + spread * (alpha + size * beta), (delay, spread, *link)),
        gather=Equation("owners have each other's terms, merge", "StragglAR", gather, (ranks, parts, *link)),
        merge=Equation("merge", "own", sympy.Max(delay, gather) + merge, (delay, ranks, parts, spread, *link)),
        merge_parts=Equation("best parts of merge", "solved from merge", best.subs({slope: 1, steps: spread}), (spread, *link)),
        streamed_gather=Equation(
            "owners have each other's terms, streamed", "own", streamed_gather, (ranks, late, each, *link)
        ),
        streamed=Equation("streamed", "own", sympy.Max(delay, streamed_gather) + streamed, (delay, ranks, late, each, *link)),
        streamed_parts=Equation(
            "best parts of each owner, streamed",
            "solved from streamed",
            best.subs({slope: 1, steps: 1, size: size / (ranks - late)}),
            (ranks, late, *link),
        ),
        narrow=Equation(
            "streamed, narrow ports",
            "own",
            sympy.Max(through_owners, through_narrow) + (ranks - 1) * message,
            (ranks, late, each, *link, narrow),
        ),
        critical_delay=Equation(
            "critical delay",
            "difference of merge without a wait and direct",
            sympy.Max(0, gather + merge - exchange),
            (ranks, parts, spread, *link),
        ),
        most_late=Equation(
            "most late ranks for streamed",
            "solved from streamed and direct",
            solved(exchange - streamed, late),
            (ranks, each, *link),
        ),
        share=Equation(
            "share of rank r",
            "own",
            sympy.Max(0, (level - arrival) / (size * port) - 1) / (ranks - 2),
            (level, arrival, ranks, size, port),
        ),
        alone=Equation("rank r alone", "lower bound", arrival + alpha + size * port, (arrival, size, alpha, port)),
    )
