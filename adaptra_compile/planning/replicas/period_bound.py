"""Lower bounds of the period of several replicas: under a routing, no order of ops repeats faster.

For a worker, let n be the number of microbatches that it computes, and R the shortest round trip of one of them. That is the
time from the end of its F, through all later stages and back, to the start of its I.

- work: all its ops, STEP and REDUCE, one after the other;
- fill: before its first I it runs nothing but F, and at most as many as its memory holds. It idles for the rest of F + R;
- memory: with room for A microbatches, one of A places sees ⌈n / A⌉ microbatches in turn, each for F + R + I + W;
- link, port: all messages that cross it occupy it one after the other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from adaptra.program.routing import Route, Routing
from adaptra.simulation.job_case import JobCase, WorkerLink


class PeriodBoundKind(Enum):
    """The reason why no order repeats faster; see :mod:`adaptra.planning.replicas.period_bound`."""

    WORK = "work"
    FILL = "fill"
    MEMORY = "memory"
    LINK = "link"
    PORT = "port"


@dataclass(frozen=True, slots=True)
class PeriodBound:
    """A lower bound of the period, in the case's unit, and its cause: a worker, or a link between two.

    It is a sum of rounded numbers, so compare with a relative tolerance of 1e-9.
    """

    value: float
    kind: PeriodBoundKind
    where: str

    def __str__(self) -> str:
        return f"{self.value:.10g} ({self.kind.value}, {self.where})"


def period_bound(case: JobCase, routing: Routing) -> PeriodBound:
    """Return the greatest of the bounds, the first in the order of :class:`PeriodBoundKind` if several are equal."""
    kinds = list(PeriodBoundKind)
    return max((*_of_workers(case, routing), *_of_messages(case, routing)), key=lambda one: (one.value, -kinds.index(one.kind)))


def _of_workers(case: JobCase, routing: Routing) -> Iterator[PeriodBound]:
    cost = case.cost
    count: defaultdict[tuple[int, int], int] = defaultdict(int)
    shortest: defaultdict[tuple[int, int], float] = defaultdict(lambda: math.inf)
    for route in routing.routes:
        trips = _round_trips(case, route)
        for stage, worker in enumerate(route.workers):
            count[worker, stage] += len(route.microbatches)
            shortest[worker, stage] = min(shortest[worker, stage], trips[stage])
    for worker in routing.live:
        slow = case.slow.get(worker, 1.0)
        stages = routing.stages_of(worker)
        update = sum(case.step[stage] * slow + case.reduce[stage] for stage in stages)
        work = update
        for stage in stages:
            work += count[worker, stage] * (cost.forward[stage] + cost.input_grad[stage] + cost.weight_grad[stage]) * slow
        yield PeriodBound(work, PeriodBoundKind.WORK, f"worker {worker}")
        if len(stages) != 1 or not count[worker, stages[0]]:
            continue
        (stage,) = stages
        number, forward, trip = count[worker, stage], cost.forward[stage] * slow, shortest[worker, stage]
        room = number if case.memory is None else min(number, case.memory[stage])
        yield PeriodBound(work + max(forward + trip - room * forward, 0.0), PeriodBoundKind.FILL, f"worker {worker}")
        once = forward + trip + (cost.input_grad[stage] + cost.weight_grad[stage]) * slow
        yield PeriodBound(math.ceil(number / room) * once + update, PeriodBoundKind.MEMORY, f"worker {worker}")


def _of_messages(case: JobCase, routing: Routing) -> Iterator[PeriodBound]:
    links: defaultdict[tuple[int, int], float] = defaultdict(float)
    ports: defaultdict[tuple[int, str], float] = defaultdict(float)
    for route in routing.routes:
        number = len(route.microbatches)
        for source, destination, link in _messages(case, route):
            links[source, destination] += number * link.occupancy
            ports[source, "sends"] += number * case.ports.get(source, 0.0)
            ports[destination, "receives"] += number * case.ports.get(destination, 0.0)
    for (source, destination), busy in links.items():
        yield PeriodBound(busy, PeriodBoundKind.LINK, f"link {source}→{destination}")
    for (worker, what), busy in ports.items():
        yield PeriodBound(busy, PeriodBoundKind.PORT, f"worker {worker} {what}")


def _round_trips(case: JobCase, route: Route) -> list[float]:
    """Return, per stage, the time from the end of its F to the earliest start of its I, by ops and messages."""
    cost = case.cost
    trips = [0.0]
    for stage in range(case.stages - 2, -1, -1):
        here, there = route.workers[stage], route.workers[stage + 1]
        ops = (cost.forward[stage + 1] + cost.input_grad[stage + 1]) * case.slow.get(there, 1.0)
        links = case.link(here, there), case.link(there, here)
        trips.append(trips[-1] + ops + sum(link.latency + link.occupancy for link in links))
    return trips[::-1]


def _messages(case: JobCase, route: Route) -> Iterator[tuple[int, int, WorkerLink]]:
    """Yield source, destination and link of the messages of one microbatch, forwards and backwards."""
    for here, there in pairwise(route.workers):
        yield here, there, case.link(here, there)
        yield there, here, case.link(there, here)
