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
from itertools import groupby, pairwise

from adaptra.program.routing import Route, Routing
from adaptra.simulation.job_case import JobCase


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


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker computes of one of its stages.

    Attributes:
        worker: The worker.
        stage: The stage.
        microbatches: The number of microbatches, those of other replicas included.
        trip: Their shortest round trip, infinite if there is none.
    """

    worker: int
    stage: int
    microbatches: int
    trip: float


def loads(case: JobCase, routing: Routing) -> Iterator[WorkerLoad]:
    """Yield the loads of all live workers, by worker and stage."""
    count: defaultdict[tuple[int, int], int] = defaultdict(int)
    shortest: defaultdict[tuple[int, int], float] = defaultdict(lambda: math.inf)
    for route in routing.routes:
        trips = _round_trips(case, route)
        for stage, worker in enumerate(route.workers):
            count[worker, stage] += len(route.microbatches)
            shortest[worker, stage] = min(shortest[worker, stage], trips[stage])
    for worker in routing.live:
        for stage in routing.stages_of(worker):
            yield WorkerLoad(worker, stage, count[worker, stage], shortest[worker, stage])


def _of_workers(case: JobCase, routing: Routing) -> Iterator[PeriodBound]:
    cost = case.cost
    for worker, group in groupby(loads(case, routing), key=lambda load: load.worker):
        of_stages = list(group)
        slow = case.slow.get(worker, 1.0)
        update = sum(case.step[load.stage] * slow + case.reduce[load.stage] for load in of_stages)
        work = update
        for load in of_stages:
            ops = cost.forward[load.stage] + cost.input_grad[load.stage] + cost.weight_grad[load.stage]
            work += load.microbatches * ops * slow
        yield PeriodBound(work, PeriodBoundKind.WORK, f"worker {worker}")
        if len(of_stages) != 1 or not of_stages[0].microbatches:
            continue
        (load,) = of_stages
        stage, number, forward = load.stage, load.microbatches, cost.forward[load.stage] * slow
        room = number if case.memory is None else min(number, case.memory[stage])
        yield PeriodBound(work + max(forward + load.trip - room * forward, 0.0), PeriodBoundKind.FILL, f"worker {worker}")
        once = forward + load.trip + (cost.input_grad[stage] + cost.weight_grad[stage]) * slow
        yield PeriodBound(math.ceil(number / room) * once + update, PeriodBoundKind.MEMORY, f"worker {worker}")


@dataclass(frozen=True, slots=True)
class Traffic:
    """The messages of a step over a link or through a port.

    Attributes:
        kind: Whether it is a link or a port.
        where: Its name for people.
        ends: The workers at the ends of the link; twice the port's worker for a port.
        messages: The number of messages in one direction.
        occupancy: How long each occupies it.
    """

    kind: PeriodBoundKind
    where: str
    ends: tuple[int, int]
    messages: int
    occupancy: float


def traffic(case: JobCase, routing: Routing) -> Iterator[Traffic]:
    """Yield the messages over each directed link in use, then those through each port and direction."""
    links: defaultdict[tuple[int, int], int] = defaultdict(int)
    ports: defaultdict[tuple[int, str], int] = defaultdict(int)
    for route in routing.routes:
        number = len(route.microbatches)
        for here, there in pairwise(route.workers):
            for source, destination in ((here, there), (there, here)):
                links[source, destination] += number
                ports[source, "sends"] += number
                ports[destination, "receives"] += number
    for (source, destination), number in links.items():
        occupancy = case.link(source, destination).occupancy
        yield Traffic(PeriodBoundKind.LINK, f"link {source}→{destination}", (source, destination), number, occupancy)
    for (worker, what), number in ports.items():
        occupancy = case.ports.get(worker, 0.0)
        yield Traffic(PeriodBoundKind.PORT, f"worker {worker} {what}", (worker, worker), number, occupancy)


def _of_messages(case: JobCase, routing: Routing) -> Iterator[PeriodBound]:
    for one in traffic(case, routing):
        yield PeriodBound(one.messages * one.occupancy, one.kind, one.where)


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
