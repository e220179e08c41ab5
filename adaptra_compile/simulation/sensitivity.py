"""Sensitivity of a program to added delay on each directed edge: the delay that it absorbs, and the cost of more delay.

The figures are exact and come from the simulator. First take the case that messages neither block stages nor share an edge with
the other direction. Then the makespan is the longest path of a graph in which all arcs over an edge grow with its latency. As a
function of added latency it is convex and piecewise linear. The slope is the number of the edge's messages on the longest path.
Newton's method starts from a large delay and finds where the makespan meets a limit. It takes at most one step per line. In
other modes a longer delay may even shorten a step. Bisection then finds a delay beyond which the step exceeds the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from adaptra.program import Program
from adaptra.simulation.cost import Blocking, CostModel
from adaptra.simulation.simulate import Simulation, simulate
from adaptra.simulation.timeline import MessageInterval, OpInterval

_TOLERANCE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class EdgeSensitivity:
    """Effect of added latency on one directed edge, in the cost model's unit of time.

    Attributes:
        source: The stage that sends.
        destination: The neighbouring stage that receives.
        absorbs: The largest latency that can be added to each message without lengthening the step.
        slope: Lengthening of the step per unit of latency just beyond ``absorbs``.
        once: The largest added latency by which the step gets no longer than that latency itself. Up to here a delay is paid
            once, since the pipeline must fill and drain, and no bubble cascades. Infinite if it is never paid more often.
        most: Lengthening of the step per unit of a very long delay: the number of the edge's messages on the critical path.
    """

    source: int
    destination: int
    absorbs: float
    slope: int
    once: float
    most: int

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values, with None for infinity."""
        return asdict(self) | {"once": self.once if math.isfinite(self.once) else None}


def sensitivity(program: Program, cost: CostModel) -> tuple[EdgeSensitivity, ...]:
    """Return one entry per directed edge, 0→1, 1→0, 1→2 and so on, but for those between stages of one rank, where no
    message is sent.

    Each edge takes a handful of simulations, or a few dozen if communication blocks or shares an edge.

    Raises:
        CaseError, ScheduleError: As :func:`adaptra.simulation.simulate.simulate`.
    """
    now = simulate(program, cost).makespan
    return tuple(_of_edge(program, cost, source, destination, now) for source, destination in _edges(program))


def _edges(program: Program) -> Iterator[tuple[int, int]]:
    for edge in range(program.stages - 1):
        if program.placement[edge] == program.placement[edge + 1]:
            continue
        yield edge, edge + 1
        if not program.is_forward_only:
            yield edge + 1, edge


def _of_edge(program: Program, cost: CostModel, source: int, destination: int, now: float) -> EdgeSensitivity:
    latency = cost.latency(source, destination)
    # Without the delay no path is longer than `now`. So at a longer delay the paths with the most messages of the edge are the
    # longest.
    longest = 2 * now if now > 0 else 1.0
    convex = not cost.half_duplex and cost.blocking is Blocking.NONE

    def delayed(delay: float) -> tuple[float, int]:
        simulation = simulate(program, cost.with_latency(source, destination, latency + delay))
        return simulation.makespan, _latencies(simulation, source, destination)

    find = _newton if convex else _bisection
    _, most = delayed(longest)
    absorbs, slope = find(delayed, now, 0, longest)
    once = find(delayed, now, 1, longest)[0] if most > 1 else math.inf
    return EdgeSensitivity(source, destination, absorbs, slope, once, most)


def _newton(delayed: Callable[[float], tuple[float, int]], now: float, allowed: int, delay: float) -> tuple[float, int]:
    """Find the greatest delay at which the makespan is at most ``now + allowed * delay``, and the slope just beyond."""
    makespan, slope = delayed(delay)
    while True:
        delay -= (makespan - now - allowed * delay) / (slope - allowed)
        if delay < _TOLERANCE * now:
            return 0.0, slope
        makespan, next_slope = delayed(delay)
        if makespan <= (now + allowed * delay) * (1 + _TOLERANCE) or next_slope <= allowed:
            return delay, slope
        slope = next_slope


def _bisection(delayed: Callable[[float], tuple[float, int]], now: float, allowed: int, high: float) -> tuple[float, int]:
    """Find a delay just beyond which the makespan exceeds ``now + allowed * delay``, and the slope there."""
    low, beyond, precision = 0.0, delayed(high), _TOLERANCE * high
    while high - low > precision:
        middle = (low + high) / 2
        tried = delayed(middle)
        if tried[0] > (now + allowed * middle) * (1 + _TOLERANCE):
            high, beyond = middle, tried
        else:
            low = middle
    return low, beyond[1]


def _latencies(simulation: Simulation, source: int, destination: int) -> int:
    """Return how often the edge's latency counts on the critical path. A message that only occupies the edge does not count."""
    path = simulation.critical_path
    return sum(
        isinstance(step, MessageInterval) and (step.source, step.destination) == (source, destination)
        for step, after in pairwise(path)
        if isinstance(after, OpInterval)
    )
