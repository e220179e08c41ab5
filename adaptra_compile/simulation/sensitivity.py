"""How much more delay on each directed edge a program absorbs before its step takes longer, and what more delay costs then.

Exact, from the simulator. Where messages neither hold stages nor share an edge with the other direction, the makespan is the
longest path of a graph in which all arcs over an edge grow with its latency: as a function of added latency it is convex and
made of straight lines, whose slope is how many messages of the edge stand on the longest path. From far to the right, the line
at hand is followed to where it meets a limit, until that is where the makespan is: Newton's method, which takes at most as many
steps as there are lines. In other modes a longer delay may even shorten a step; there bisection finds a delay beyond which the
step is above the limit.
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
    """What added latency on one directed edge does to the step, all else unchanged. In the cost model's unit.

    Attributes:
        source: The stage that sends.
        destination: The neighbouring stage that receives.
        absorbs: How much latency can be added to each message before the step takes longer.
        slope: How much longer the step gets for every unit just beyond.
        once: How much can be added before the step gets longer by more than that. Up to here a delay is paid once, as it must
            be where the pipeline fills or drains, and no bubble cascades. Infinite when more is never paid.
        most: What a unit of a very long delay costs: how many messages of the edge follow each other on the critical path.
    """

    source: int
    destination: int
    absorbs: float
    slope: int
    once: float
    most: int

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values; an infinite one as None."""
        return asdict(self) | {"once": self.once if math.isfinite(self.once) else None}


def sensitivity(program: Program, cost: CostModel) -> tuple[EdgeSensitivity, ...]:
    """One entry per directed edge, 0→1, 1→0, 1→2 and so on; edges between stages of one rank too.

    Each edge takes a handful of simulations (a few dozen where communication blocks or shares an edge).

    Raises:
        CaseError, ScheduleError: As :func:`adaptra.simulation.simulate.simulate`.
    """
    now = simulate(program, cost).makespan
    return tuple(_of_edge(program, cost, source, destination, now) for source, destination in _edges(program))


def _edges(program: Program) -> Iterator[tuple[int, int]]:
    for edge in range(program.stages - 1):
        yield edge, edge + 1
        if not program.is_forward_only:
            yield edge + 1, edge


def _of_edge(program: Program, cost: CostModel, source: int, destination: int, now: float) -> EdgeSensitivity:
    latency = cost.latency(source, destination)
    # No path through the program is longer than `now` without the delay, so that at a longer delay, those with the most
    # messages of the edge are the longest.
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
    """The greatest delay at which the makespan is not above ``now + allowed * delay``, and the slope just beyond."""
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
    """A delay at which the makespan is not above ``now + allowed * delay`` but soon beyond is, and the slope there."""
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
    """How often the edge's latency counts on the critical path: not where a message only keeps the edge from the next one."""
    path = simulation.critical_path
    return sum(
        isinstance(step, MessageInterval) and (step.source, step.destination) == (source, destination)
        for step, after in pairwise(path)
        if isinstance(after, OpInterval)
    )
