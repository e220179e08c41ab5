"""Lower bounds of the period of several replicas: under a routing, no order of ops repeats faster.

For a worker, let n be the number of microbatches that it computes, and R the shortest round trip of one of them. That is the
time from the end of its F, through all later stages and back, to the start of its I.

- work: all its ops, STEP and REDUCE, one after the other;
- barrier: behind it a worker idles until the first F of its stage arrives. Fill and memory add to that;
- fill: before its first I it runs nothing but F, and at most as many as its memory holds. It idles for the rest of F + R;
- memory: with room for A microbatches, one of A places sees ⌈n / A⌉ microbatches in turn, each for F + R + I + W;
- link, port: all messages that cross it occupy it one after the other.

A worker with several stages counts each microbatch once per stage. Its first I comes no earlier than the F of the same
microbatch on its earlier stages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from adaptra.program.routing import Route, Routing
from adaptra.simulation.job_case import JobCase, WorkerLink


class PeriodBoundKind(Enum):
    """The reason why no order repeats faster; see :mod:`adaptra.planning.replicas.period_bound`."""

    WORK = "work"
    BARRIER = "barrier"
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


@dataclass(slots=True)
class _Visit:
    """What a worker has of the routes that pass one of its stages on it: how many microbatches, and their shortest times.

    Attributes:
        count: The number of microbatches.
        trip: From the end of F to the start of I.
        first: From the start of the worker's first F of the microbatch to the start of I.
        arrival: From the barrier to the start of F.
    """

    count: int = 0
    trip: float = math.inf
    first: float = math.inf
    arrival: float = math.inf


def _of_workers(case: JobCase, routing: Routing) -> Iterator[PeriodBound]:
    cost = case.cost
    steps = {
        worker: sum(case.step[stage] * case.slow.get(worker, 1.0) for stage in routing.stages_of(worker))
        for worker in routing.live
    }
    visits: defaultdict[int, dict[int, _Visit]] = defaultdict(dict)
    for route in routing.routes:
        begins, after_barrier, trips = _times_of(case, route, steps)
        first: dict[int, int] = {}
        for stage, worker in enumerate(route.workers):
            start = first.setdefault(worker, stage)
            visit = visits[worker].setdefault(stage, _Visit())
            visit.count += len(route.microbatches)
            visit.trip = min(visit.trip, trips[stage])
            forward = cost.forward[stage] * case.slow.get(worker, 1.0)
            visit.first = min(visit.first, begins[stage] - begins[start] + forward + trips[stage])
            visit.arrival = min(visit.arrival, after_barrier[stage])
    for worker in routing.live:
        slow = case.slow.get(worker, 1.0)
        update = steps[worker] + sum(case.reduce[stage] for stage in routing.stages_of(worker))
        seen, where = visits[worker], f"worker {worker}"
        work = update
        for stage, visit in seen.items():
            work += visit.count * (cost.forward[stage] + cost.input_grad[stage] + cost.weight_grad[stage]) * slow
        yield PeriodBound(work, PeriodBoundKind.WORK, where)
        if not seen:
            continue
        wait = 0.0
        if case.barrier:
            wait = max(min(visit.arrival for visit in seen.values()) - steps[worker], 0.0)
            yield PeriodBound(work + wait, PeriodBoundKind.BARRIER, where)
        number = sum(visit.count for visit in seen.values())
        room = number if case.memory is None else min(number, case.memory[case.placement[next(iter(seen))]])
        forwards = min(
            sum(visit.count * cost.forward[stage] * slow for stage, visit in seen.items()),
            room * max(cost.forward[stage] * slow for stage in seen),
        )
        idle = max(min(visit.first for visit in seen.values()) - forwards, 0.0)
        yield PeriodBound(work + wait + idle, PeriodBoundKind.FILL, where)
        held = {
            stage: cost.forward[stage] * slow + visit.trip + (cost.input_grad[stage] + cost.weight_grad[stage]) * slow
            for stage, visit in seen.items()
        }
        in_turn = math.ceil(number / room) * min(held.values())
        together = sum(visit.count * held[stage] for stage, visit in seen.items()) / room
        yield PeriodBound(max(in_turn, together) + wait + update, PeriodBoundKind.MEMORY, where)


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


def _times_of(case: JobCase, route: Route, steps: Mapping[int, float]) -> tuple[list[float], list[float], list[float]]:
    """Return three times per stage, by ops and messages alone, of a microbatch that nothing delays.

    The first is the start of its F. The second is the same after a barrier, where each worker first runs its STEP for
    ``steps``. The third is the time from the end of its F to the start of its I.
    """
    cost = case.cost
    begins, after_barrier, trips = [0.0], [steps[route.workers[0]]], [0.0]
    for stage, (here, there) in enumerate(pairwise(route.workers)):
        link = case.link(here, there, (stage, stage + 1))
        once = cost.forward[stage] * case.slow.get(here, 1.0) + link.latency + link.occupancy
        begins.append(begins[-1] + once)
        after_barrier.append(max(after_barrier[-1] + once, steps[there]))
    for stage in range(case.stages - 2, -1, -1):
        here, there = route.workers[stage], route.workers[stage + 1]
        ops = (cost.forward[stage + 1] + cost.input_grad[stage + 1]) * case.slow.get(there, 1.0)
        links = case.link(here, there, (stage, stage + 1)), case.link(there, here, (stage + 1, stage))
        trips.append(trips[-1] + ops + sum(link.latency + link.occupancy for link in links))
    return begins, after_barrier, trips[::-1]


def _messages(case: JobCase, route: Route) -> Iterator[tuple[int, int, WorkerLink]]:
    """Yield source, destination and link of the messages of one microbatch between workers, forwards and backwards."""
    for stage, (here, there) in enumerate(pairwise(route.workers)):
        if here != there:
            yield here, there, case.link(here, there, (stage, stage + 1))
            yield there, here, case.link(there, here, (stage + 1, stage))
