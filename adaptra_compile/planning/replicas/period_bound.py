"""Lower bounds of the period of several replicas: under a routing, no order of ops repeats faster.

For a worker, let n be the number of microbatches that it computes, A those for which it has room, at most n, and R the
shortest round trip of one of them. That is the time from the end of its F, through all later stages and back, to the start of
its I.

- work: all its ops, STEP and REDUCE, one after the other;
- fill: as work, and the worker idles. Before its first I it runs nothing but A of F, and idles for the rest of F + R. Before the
  last F's I it runs at most A - 1 of I and of W, and idles for the rest of R. With n = A these two may be the same time;
- path: all its F and I lie within the step of any earlier stage on their routes. They start after STEP there and the way
  forwards, and end before the way back, W and REDUCE there. The worker idles as for fill, and runs n - A of W before its last F;
- memory: one of A places sees ⌈n / A⌉ microbatches in turn, each for F + R + I + W;
- link, port: all messages that cross it occupy it one after the other. The first one comes after STEP of an earlier stage and
  the way forwards, and the last one before the way back, as for path.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from adaptra.program.routing import Routing
from adaptra.simulation.job_case import JobCase


class PeriodBoundKind(Enum):
    """The reason why no order repeats faster; see :mod:`adaptra.planning.replicas.period_bound`."""

    WORK = "work"
    FILL = "fill"
    PATH = "path"
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
    paths: Counter[tuple[int, ...]] = Counter()
    for route in routing.routes:
        paths[route.workers] += len(route.microbatches)
    shares = _shares(case, paths)
    bounds = (*_of_workers(case, routing, shares), *_of_messages(case, routing, paths, shares))
    return max(bounds, key=lambda one: (one.value, -kinds.index(one.kind)))


@dataclass(slots=True)
class _Share:
    """What a worker computes of a stage.

    Attributes:
        count: The number of microbatches.
        trip: The shortest round trip.
        ways: Per earlier stage, the last one first: the shortest times from the stage's start to the departure and to the
            arrival of the message forwards, and that of the way back to the stage's end.
    """

    count: int
    trip: float
    ways: list[tuple[float, float, float]]


def _of_workers(case: JobCase, routing: Routing, shares: dict[tuple[int, int], _Share]) -> Iterator[PeriodBound]:
    cost = case.cost
    updates = _updates(case, routing)
    for worker in routing.live:
        slow, where = case.slow.get(worker, 1.0), f"worker {worker}"
        stages = routing.stages_of(worker)
        update = sum(case.step[stage] * slow + case.reduce[stage] for stage in stages)
        work = update
        for stage in stages:
            if (worker, stage) in shares:
                ops = cost.forward[stage] + cost.input_grad[stage] + cost.weight_grad[stage]
                work += shares[worker, stage].count * ops * slow
        yield PeriodBound(work, PeriodBoundKind.WORK, where)
        if len(stages) != 1 or (worker, stages[0]) not in shares:
            continue
        (stage,) = stages
        share = shares[worker, stage]
        number, trip = share.count, share.trip
        forward, back, weight = (times[stage] * slow for times in (cost.forward, cost.input_grad, cost.weight_grad))
        room = number if case.memory is None else min(number, case.memory[stage])
        first = max(forward + trip - room * forward, 0.0)
        last = max(trip - (room - 1) * (back + weight), 0.0)
        yield PeriodBound(work + (first + last if number > room else max(first, last)), PeriodBoundKind.FILL, where)
        last = max(trip - (room - 1) * back, 0.0)
        inside = number * (forward + back) + (number - room) * weight
        inside += first + last if number > room else max(first, last)
        for earlier, (_, out, home) in zip(range(stage - 1, -1, -1), share.ways, strict=True):
            yield PeriodBound(updates[earlier] + out + inside + home, PeriodBoundKind.PATH, f"{where}, stage {earlier}")
        once = forward + trip + back + weight
        yield PeriodBound(math.ceil(number / room) * once + update, PeriodBoundKind.MEMORY, where)


def _shares(case: JobCase, paths: Counter[tuple[int, ...]]) -> dict[tuple[int, int], _Share]:
    """Return what each worker computes of each of its stages, if anything."""
    found: dict[tuple[int, int], _Share] = {}
    for path, number in paths.items():
        for stage, (trip, ways) in enumerate(zip(_round_trips(case, path), _ways(case, path), strict=True)):
            key = path[stage], stage
            share = found.setdefault(key, _Share(0, trip, ways))
            share.count += number
            share.trip = min(share.trip, trip)
            share.ways = [(min(a, d), min(b, e), min(c, f)) for (a, b, c), (d, e, f) in zip(share.ways, ways, strict=True)]
    return found


def _updates(case: JobCase, routing: Routing) -> list[float]:
    """Return the least time of STEP and REDUCE, per stage."""
    fastest = [min(case.slow.get(worker, 1.0) for worker in routing.column(stage)) for stage in range(case.stages)]
    return [step * slow + reduce for step, slow, reduce in zip(case.step, fastest, case.reduce, strict=True)]


def _of_messages(
    case: JobCase, routing: Routing, paths: Counter[tuple[int, ...]], shares: dict[tuple[int, int], _Share]
) -> Iterator[PeriodBound]:
    links: defaultdict[tuple[int, int], int] = defaultdict(int)
    queues: dict[tuple[int, int], _Queues] = {}
    ports: defaultdict[int, int] = defaultdict(int)
    updates = _updates(case, routing)
    for path, number in paths.items():
        for stage, (here, there) in enumerate(pairwise(path)):
            links[here, there] += number
            ports[here] += number
            ports[there] += number
            if (here, there) not in queues:
                queues[here, there] = _queues(case, here, stage, shares[here, stage], updates)
    for (here, there), number in links.items():
        for source, destination in ((here, there), (there, here)):
            occupancy = case.link(source, destination).occupancy
            value = max(number * occupancy, queues[here, there].link + (number - 1) * occupancy) if occupancy else 0.0
            yield PeriodBound(value, PeriodBoundKind.LINK, f"link {source}→{destination}")
    for (worker, stage), share in shares.items():
        number, port = ports[worker], case.ports.get(worker, 0.0)
        if not number or not port:
            continue
        sends = receives = 0.0
        if len(routing.stages_of(worker)) == 1:
            around = _queues(case, worker, stage, share, updates)
            sends, receives = around.sends, around.receives
        for what, least in (("sends", sends), ("receives", receives)):
            value = max(number * port, least + (number - 1) * port)
            yield PeriodBound(value, PeriodBoundKind.PORT, f"worker {worker} {what}")


class _Queues(NamedTuple):
    """The least time of a period beside the queue of messages that cross one link or port.

    Attributes:
        link: For either link to a worker of the next stage, beside all messages but one.
        sends, receives: The same for a worker's port.
    """

    link: float
    sends: float
    receives: float


def _queues(case: JobCase, worker: int, stage: int, share: _Share, updates: list[float]) -> _Queues:
    slow = case.slow.get(worker, 1.0)
    forward, back, weight = (
        times[stage] * slow for times in (case.cost.forward, case.cost.input_grad, case.cost.weight_grad)
    )
    once = forward + share.trip + back
    link = updates[stage] + once + weight
    # The first stage sends and receives one message per microbatch, as a link carries. Its receives follow from its sends.
    sends, receives = (link, 0.0) if stage == 0 else (0.0, 0.0)
    is_last = stage + 1 == case.stages
    for earlier, (sent, out, home) in zip(range(stage - 1, -1, -1), share.ways, strict=True):
        link = max(link, updates[earlier] + out + once + home)
        sends = max(sends, updates[earlier] + out + forward + back * is_last + home)
        receives = max(
            receives, updates[earlier] + sent + case.ports.get(worker, 0.0) + forward * is_last + back + home
        )
    return _Queues(link, sends, receives)


def _round_trips(case: JobCase, path: tuple[int, ...]) -> list[float]:
    """Return, per stage, the time from the end of its F to the earliest start of its I, by ops and messages."""
    cost = case.cost
    trips = [0.0]
    for stage in range(case.stages - 2, -1, -1):
        here, there = path[stage], path[stage + 1]
        ops = (cost.forward[stage + 1] + cost.input_grad[stage + 1]) * case.slow.get(there, 1.0)
        trips.append(trips[-1] + ops + _flight(case, here, there) + _flight(case, there, here))
    return trips[::-1]


def _ways(case: JobCase, path: tuple[int, ...]) -> list[list[tuple[float, float, float]]]:
    """Return :attr:`_Share.ways` of each stage, for one microbatch that takes a path."""
    cost = case.cost
    found: list[list[tuple[float, float, float]]] = [[]]
    for stage, (here, there) in enumerate(pairwise(path)):
        slow = case.slow.get(here, 1.0)
        ready, out = cost.forward[stage] * slow, _flight(case, here, there)
        home = cost.input_grad[stage] * slow + _flight(case, there, here)
        longer = [(out_before + ready, out_before + ready + out, home + after) for _, out_before, after in found[-1]]
        found.append([(ready, ready + out, home + cost.weight_grad[stage] * slow), *longer])
    return found


def _flight(case: JobCase, source: int, destination: int) -> float:
    """Return the least time from the departure of a message to its arrival."""
    link = case.link(source, destination)
    return link.latency + max(link.occupancy, case.ports.get(source, 0.0), case.ports.get(destination, 0.0))
