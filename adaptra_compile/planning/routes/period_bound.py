"""Lower bounds of the period of several replicas: under a routing, no order of ops repeats faster.

For a worker, let n be the number of microbatches that it computes. A of them, at most n, have room at once. R is the shortest
round trip of one of them. That is the time from the end of its F, through all later stages and back, to the start of
its I.

- work: all its ops, STEP and REDUCE, one after the other;
- barrier: behind it a worker idles until the first F of its stage arrives. Fill and memory add to that;
- fill: as work, and the worker idles. Before its first I it runs nothing but A of F, and idles for the rest of F + R. Before
  the last F's I it runs at most A - 1 of I and of W, and idles for the rest of R. With n = A both may be the same time;
- path: all its F and I lie within the step of any earlier stage on their routes. They start after STEP there and the way
  forwards, and end before the way back, W and REDUCE there. It idles as for fill, and runs n - A of W before its last F;
- memory: one of A places sees ⌈n / A⌉ microbatches in turn, each for F + R + I + W;
- link, port: all messages that cross it occupy it one after the other. The first one comes after STEP of an earlier stage and
  the way forwards, and the last one before the way back, as for path.

A worker with several stages counts each microbatch once per stage. Its first I comes no earlier than the F of the same
microbatch on its earlier stages. Such placements have no bound of path. Their fill counts only what is before the first I,
and their links and ports only messages.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from adaptra.errors import CaseError
from adaptra.program.placement import Edge, is_straight
from adaptra.program.routing import Routing
from adaptra.simulation.bound import Bound, BoundKind
from adaptra.simulation.case import Case


def period_bound(case: Case, routing: Routing) -> Bound:
    """Return the greatest of the bounds, the first in the order of :class:`BoundKind` if several are equal.

    Raises:
        CaseError: Edges are half duplex or communication blocks.
    """
    case.check_edges()
    kinds = list(BoundKind)
    paths: Counter[tuple[int, ...]] = Counter()
    for route in routing.routes:
        paths[route.workers] += len(route.microbatches)
    shares = _shares(case, paths)
    bounds = (*_of_workers(case, routing, paths, shares), *_of_messages(case, routing, paths, shares))
    return max(bounds, key=lambda one: (one.value, -kinds.index(one.kind)))


def flow_bound(case: Case) -> Bound:
    """Return a bound of the period under every routing, in which workers take the shares that suit them best.

    Of the bounds above it has those of workers and ports, each with the shortest ways through any workers. Links count only
    for the time of a message.

    Raises:
        CaseError: A worker has several stages.
    """
    if not is_straight(case.placement):
        raise CaseError(f"flow_bound: placement {list(case.placement)}: expected one stage per worker")
    updates = _updates(case, case.grid)
    shortest = _shortest(case)
    taken_bounds: list[Bound] = []
    for stage, column in enumerate(case.columns):
        neighbours = (stage > 0) + (stage + 1 < case.stages)

        def next_bound(worker: int, number: int, stage: int = stage, neighbours: int = neighbours) -> tuple[float, int, Bound]:
            share = replace(shortest[worker], count=number)
            bounds = [*_of_waiting(case, worker, stage, share, updates)]
            if neighbours:
                bounds += _of_port(case, worker, number * neighbours, _queues(case, worker, stage, share, updates))
            greatest = max(bounds, key=lambda one: one.value)
            return greatest.value, worker, greatest

        counts = dict.fromkeys(column, 1)
        ends = [next_bound(worker, 1) for worker in counts]
        heapq.heapify(ends)
        for _ in range(case.replicas * case.microbatches):
            _, worker, taken = ends[0]
            taken_bounds.append(taken)
            counts[worker] += 1
            heapq.heapreplace(ends, next_bound(worker, counts[worker]))
    return max(taken_bounds, key=lambda one: one.value)


def _shortest(case: Case) -> dict[int, _Share]:
    """Return, per live worker, its trip and ways with the shortest ones of all paths."""
    columns = case.columns
    trips: dict[int, float] = dict.fromkeys(columns[-1], 0.0)
    for stage in range(case.stages - 2, -1, -1):
        for here in columns[stage]:
            trips[here] = min(_round_trip(case, stage, here, there, trips[there]) for there in columns[stage + 1])
    shares = {worker: _Share(0, trips[worker], []) for worker in columns[0]}
    for stage, (before, column) in enumerate(pairwise(columns)):
        for there in column:
            ways = [_longer(case, stage, here, there, shares[here].ways) for here in before]
            shares[there] = _Share(0, trips[there], ways[0])
            for one in ways:
                shares[there].take(0, trips[there], one)
    return shares


@dataclass(slots=True)
class _Share:
    """What a worker computes of a stage.

    Attributes:
        count: The number of microbatches.
        trip: The shortest round trip.
        ways: Per earlier stage, the last one first, three shortest times. The first two begin at that stage's start, and end
            with the departure and the arrival of the message forwards. The third one is that of the way back to its end.
    """

    count: int
    trip: float
    ways: list[tuple[float, float, float]]

    def take(self, number: int, trip: float, ways: list[tuple[float, float, float]]) -> None:
        """Add microbatches that take one path."""
        self.count += number
        self.trip = min(self.trip, trip)
        self.ways = [(min(a, d), min(b, e), min(c, f)) for (a, b, c), (d, e, f) in zip(self.ways, ways, strict=True)]


def _of_workers(
    case: Case, routing: Routing, paths: Counter[tuple[int, ...]], shares: dict[tuple[int, int], _Share]
) -> Iterator[Bound]:
    cost = case.cost
    updates = _updates(case, routing.workers)
    visits, steps = _visits(case, routing, paths)
    for worker in routing.live:
        slow, stages = case.slow.get(worker, 1.0), routing.stages_of(worker)
        work = sum(case.step[stage] * slow + case.reduce[stage] for stage in stages)
        for stage in stages:
            if (worker, stage) in shares:
                ops = cost.forward[stage] + cost.input_grad[stage] + cost.weight_grad[stage]
                work += shares[worker, stage].count * ops * slow
        yield Bound(work, BoundKind.WORK, f"worker {worker}")
        seen = {stage: shares[worker, stage] for stage in stages if (worker, stage) in shares}
        if not seen:
            continue
        wait = 0.0
        if case.barrier:
            wait = max(visits[worker].arrival - steps[worker], 0.0)
            yield Bound(work + wait, BoundKind.BARRIER, f"worker {worker}")
        if is_straight(case.placement):
            yield from _of_waiting(case, worker, stages[0], seen[stages[0]], updates, wait)
        else:
            yield from _of_several(case, worker, seen, work + wait, visits[worker].first)


def _of_waiting(case: Case, worker: int, stage: int, share: _Share, updates: list[float], wait: float = 0.0) -> Iterator[Bound]:
    """Yield the bounds of a worker of one stage, in which it waits for others; behind a barrier first of all for ``wait``."""
    slow, where = case.slow.get(worker, 1.0), f"worker {worker}"
    number, trip = share.count, share.trip
    forward, back, weight = _times(case, worker, stage)
    update = case.step[stage] * slow + case.reduce[stage]
    room = number if case.memory is None else min(number, case.memory[stage])

    def idle(meanwhile: float) -> float:
        first, last = max(forward + trip - room * forward, 0.0), max(trip - (room - 1) * meanwhile, 0.0)
        return first + last if number > room else max(first, last)

    work = update + number * (forward + back + weight)
    yield Bound(work + wait + idle(back + weight), BoundKind.FILL, where)
    inside = number * (forward + back) + (number - room) * weight + idle(back)
    for earlier, (_, out, home) in zip(range(stage - 1, -1, -1), share.ways, strict=True):
        yield Bound(updates[earlier] + out + inside + home, BoundKind.PATH, f"{where}, stage {earlier}")
    once = forward + trip + back + weight
    yield Bound(math.ceil(number / room) * once + wait + update, BoundKind.MEMORY, where)


def _of_several(case: Case, worker: int, seen: dict[int, _Share], work: float, first: float) -> Iterator[Bound]:
    """Yield the bounds of a worker of several stages, given that of work and the time from its first F to its first I."""
    times = {stage: _times(case, worker, stage) for stage in seen}
    number = sum(share.count for share in seen.values())
    room = number if case.memory is None else min(number, case.memory[case.placement[next(iter(seen))]])
    forwards = min(
        sum(share.count * times[stage][0] for stage, share in seen.items()), room * max(one[0] for one in times.values())
    )
    yield Bound(work + max(first - forwards, 0.0), BoundKind.FILL, f"worker {worker}")
    held = {stage: share.trip + sum(times[stage]) for stage, share in seen.items()}
    in_turn = math.ceil(number / room) * min(held.values())
    together = sum(share.count * held[stage] for stage, share in seen.items()) / room
    ops = sum(share.count * sum(times[stage]) for stage, share in seen.items())
    yield Bound(max(in_turn, together) + work - ops, BoundKind.MEMORY, f"worker {worker}")


@dataclass(slots=True)
class _Visit:
    """The shortest times of the microbatches that pass a worker.

    Attributes:
        first: From the start of the worker's first F of a microbatch to the start of its first I.
        arrival: From a barrier, where each worker first runs STEP, to the start of F.
    """

    first: float = math.inf
    arrival: float = math.inf


def _visits(case: Case, routing: Routing, paths: Counter[tuple[int, ...]]) -> tuple[defaultdict[int, _Visit], dict[int, float]]:
    """Return what is so of each worker if it has several stages or there is a barrier, and its time of STEP."""
    steps = {
        worker: sum(case.step[stage] * case.slow.get(worker, 1.0) for stage in routing.stages_of(worker))
        for worker in routing.live
    }
    visits: defaultdict[int, _Visit] = defaultdict(_Visit)
    if is_straight(case.placement) and not case.barrier:
        return visits, steps
    for path in paths:
        begins, arrival = 0.0, 0.0
        since: dict[int, float] = {}
        for stage, (here, trip) in enumerate(zip(path, _round_trips(case, path), strict=True)):
            forward, _, _ = _times(case, here, stage)
            arrival = max(arrival, steps[here])
            start = since.setdefault(here, begins)
            visits[here].first = min(visits[here].first, begins - start + forward + trip)
            visits[here].arrival = min(visits[here].arrival, arrival)
            if stage + 1 < case.stages:
                once = forward + _flight(case, (stage, stage + 1), here, path[stage + 1])
                begins, arrival = begins + once, arrival + once
    return visits, steps


def _times(case: Case, worker: int, stage: int) -> tuple[float, float, float]:
    """Return the durations of F, I and W."""
    slow, cost = case.slow.get(worker, 1.0), case.cost
    return cost.forward[stage] * slow, cost.input_grad[stage] * slow, cost.weight_grad[stage] * slow


def _shares(case: Case, paths: Counter[tuple[int, ...]]) -> dict[tuple[int, int], _Share]:
    """Return what each worker computes of each of its stages, if anything."""
    shares: dict[tuple[int, int], _Share] = {}
    for path, number in paths.items():
        for stage, (trip, ways) in enumerate(zip(_round_trips(case, path), _ways(case, path), strict=True)):
            key = path[stage], stage
            shares.setdefault(key, _Share(0, trip, ways)).take(number, trip, ways)
    return shares


def _updates(case: Case, grid: Sequence[Sequence[int | None]]) -> list[float]:
    """Return the least time of STEP and REDUCE, per stage."""
    columns = zip(*grid, strict=True)
    fastest = [min(case.slow.get(worker, 1.0) for worker in column if worker is not None) for column in columns]
    return [step * slow + reduce for step, slow, reduce in zip(case.step, fastest, case.reduce, strict=True)]


def _of_messages(
    case: Case, routing: Routing, paths: Counter[tuple[int, ...]], shares: dict[tuple[int, int], _Share]
) -> Iterator[Bound]:
    links: defaultdict[tuple[int, int], int] = defaultdict(int)
    queues: dict[tuple[int, int], _Queues] = {}
    ports: defaultdict[int, int] = defaultdict(int)
    updates = _updates(case, routing.workers)
    if not is_straight(case.placement):
        yield from _of_shared_links(case, paths)
        return
    for path, number in paths.items():
        for stage, (here, there) in enumerate(pairwise(path)):
            links[here, there] += number
            ports[here] += number
            ports[there] += number
            if (here, there) not in queues:
                queues[here, there] = _queues(case, here, stage, shares[here, stage], updates)
    for (here, there), number in links.items():
        stage = routing.stages_of(here)[0]
        for source, destination, edge in ((here, there, (stage, stage + 1)), (there, here, (stage + 1, stage))):
            occupancy = case.link(source, destination, edge).occupancy
            value = max(number * occupancy, queues[here, there].link + (number - 1) * occupancy) if occupancy else 0.0
            yield Bound(value, BoundKind.LINK, f"link {source}→{destination}")
    for (worker, stage), share in shares.items():
        if ports[worker]:
            around = _queues(case, worker, stage, share, updates)
            yield from _of_port(case, worker, ports[worker], around)


def _of_shared_links(case: Case, paths: Counter[tuple[int, ...]]) -> Iterator[Bound]:
    """Yield the bounds of links and ports that messages between several pairs of stages share."""
    links: defaultdict[tuple[int, int], float] = defaultdict(float)
    ports: defaultdict[int, int] = defaultdict(int)
    for path, number in paths.items():
        for stage, (here, there) in enumerate(pairwise(path)):
            if here == there:
                continue
            ports[here] += number
            ports[there] += number
            links[here, there] += number * case.link(here, there, (stage, stage + 1)).occupancy
            links[there, here] += number * case.link(there, here, (stage + 1, stage)).occupancy
    for (source, destination), busy in links.items():
        yield Bound(busy, BoundKind.LINK, f"link {source}→{destination}")
    for worker, number in ports.items():
        yield Bound(number * case.ports.get(worker, 0.0), BoundKind.PORT, f"worker {worker} sends")


def _of_port(case: Case, worker: int, number: int, around: _Queues) -> Iterator[Bound]:
    port = case.ports.get(worker, 0.0)
    for what, least in (("sends", around.sends), ("receives", around.receives)):
        value = max(number * port, least + (number - 1) * port) if port else 0.0
        yield Bound(value, BoundKind.PORT, f"worker {worker} {what}")


class _Queues(NamedTuple):
    """The least time of a period beside the queue of messages that cross one link or port.

    Attributes:
        link: For either link to a worker of the next stage, beside all messages but one.
        sends, receives: The same for a worker's port.
    """

    link: float
    sends: float
    receives: float


def _queues(case: Case, worker: int, stage: int, share: _Share, updates: list[float]) -> _Queues:
    forward, back, weight = _times(case, worker, stage)
    once = forward + share.trip + back
    link = updates[stage] + once + weight
    # The first stage sends and receives one message per microbatch, as a link carries. Its receives follow from its sends.
    sends, receives = (link, 0.0) if stage == 0 else (0.0, 0.0)
    is_last = stage + 1 == case.stages
    for earlier, (sent, out, home) in zip(range(stage - 1, -1, -1), share.ways, strict=True):
        link = max(link, updates[earlier] + out + once + home)
        sends = max(sends, updates[earlier] + out + forward + back * is_last + home)
        receives = max(receives, updates[earlier] + sent + case.ports.get(worker, 0.0) + forward * is_last + back + home)
    return _Queues(link, sends, receives)


def _round_trips(case: Case, path: tuple[int, ...]) -> list[float]:
    """Return, per stage, the time from the end of its F to the earliest start of its I, by ops and messages."""
    trips = [0.0]
    for stage in range(case.stages - 2, -1, -1):
        trips.append(_round_trip(case, stage, path[stage], path[stage + 1], trips[-1]))
    return trips[::-1]


def _round_trip(case: Case, stage: int, here: int, there: int, trip: float) -> float:
    """Return the round trip from a stage's worker through one of the next stage, which has the given trip."""
    forward, back, _ = _times(case, there, stage + 1)
    out, home = _flight(case, (stage, stage + 1), here, there), _flight(case, (stage + 1, stage), there, here)
    return trip + forward + back + out + home


def _ways(case: Case, path: tuple[int, ...]) -> list[list[tuple[float, float, float]]]:
    """Return :attr:`_Share.ways` of each stage, for one microbatch that takes a path."""
    ways: list[list[tuple[float, float, float]]] = [[]]
    for stage, (here, there) in enumerate(pairwise(path)):
        ways.append(_longer(case, stage, here, there, ways[-1]))
    return ways


def _longer(
    case: Case, stage: int, here: int, there: int, ways: list[tuple[float, float, float]]
) -> list[tuple[float, float, float]]:
    """Return the ways to a worker through one of the stage before it, which has the given ways."""
    forward, back, weight = _times(case, here, stage)
    out, home = _flight(case, (stage, stage + 1), here, there), back + _flight(case, (stage + 1, stage), there, here)
    longer = [(before + forward, before + forward + out, home + after) for _, before, after in ways]
    return [(forward, forward + out, home + weight), *longer]


def _flight(case: Case, edge: Edge, source: int, destination: int) -> float:
    """Return the least time from the departure of a message to its arrival."""
    if source == destination:
        return 0.0
    link = case.link(source, destination, edge)
    return link.latency + max(link.occupancy, case.ports.get(source, 0.0), case.ports.get(destination, 0.0))
