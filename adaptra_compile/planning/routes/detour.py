"""Detours round narrow and late links: microbatches that cross to another replica's workers, and as many that cross back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

from adaptra.program.routing import Routing
from adaptra.simulation.case import Case

_MOST_CHOICES = 4
"""The most numbers of detours that are tried."""


def detours(case: Case, routing: Routing, limit: float) -> Iterator[Routing]:
    """Yield routings in which fewer messages cross each narrow link, with the fewest detours first.

    Two replicas exchange the rest of the path for some microbatches each, so that every worker computes as many as before.
    These microbatches are spread over the step. A link is narrow if its messages occupy it for longer than ``limit``.

    Args:
        case: The case.
        routing: The routing without detours.
        limit: The period that other bounds allow, in the case's unit.
    """

    def is_narrow(stage: int, here: int, there: int, _around: float) -> bool:
        return case.microbatches * _load(case, routing, stage, here, there) > limit

    pairs = _pairs(routing, partial(_occupancy, case), is_narrow)
    if not pairs:
        return
    longest = max(_load(case, routing, stage, worker, after) for stage, _, worker, after in pairs)
    least = max(case.microbatches - math.floor(limit / longest), 1)
    step = max(1, math.ceil((case.microbatches - least) / (_MOST_CHOICES - 1)))
    for number in (*range(least, case.microbatches, step), case.microbatches):
        yield _exchanged(case, routing, pairs, number)


def around_links(case: Case, routing: Routing) -> Routing | None:
    """Return the routing that leaves links which are worse than those to another replica; None if there are none.

    A link is worse if a message there and one back take longer. Two replicas exchange paths for all microbatches. So no
    accumulator of weight gradients passes from one worker to another within a step.

    Args:
        case: The case.
        routing: The routing without detours.
    """

    def is_worse(stage: int, here: int, there: int, around: float) -> bool:
        return around < _flight(case, stage, here, there)

    pairs = _pairs(routing, partial(_flight, case), is_worse)
    return _exchanged(case, routing, pairs, case.microbatches) if pairs else None


def _pairs(
    routing: Routing, time: Callable[[int, int, int], float], is_hurt: Callable[[int, int, int, float], bool]
) -> list[tuple[int, int, int, int]]:
    """Return the detours: the stage behind which two replicas exchange paths, the partner, and the ends of the hurt link.

    Args:
        routing: The routing.
        time: Returns what a link costs, given the stage before it and its workers.
        is_hurt: Returns whether a link is to be left, given these and the most that the links to the partner cost.
    """
    detours: list[tuple[int, int, int, int]] = []
    taken: set[tuple[int, int]] = set()
    for replica, path in enumerate(routing.workers):
        for stage, (here, there) in enumerate(pairwise(path)):
            if here is None or there is None or (replica, stage) in taken:
                continue
            # Of equal partners one with a bad link of its own is best: both links are left then.
            partners = [
                (max(time(stage, here, far), time(stage, near, there)), -time(stage, near, far), other)
                for other, near, far in _partners(routing, replica, stage)
                if (other, stage) not in taken
            ]
            if partners and is_hurt(stage, here, there, min(partners)[0]):
                *_, other = min(partners)
                taken |= {(replica, stage), (other, stage)}
                detours.append((stage, other, here, there))
    return detours


def _partners(routing: Routing, replica: int, stage: int) -> Iterator[tuple[int, int, int]]:
    """Yield the other replicas whose workers of a stage and the next live, with these workers."""
    for other, row in enumerate(routing.workers):
        near, far = row[stage], row[stage + 1]
        if other != replica and near is not None and far is not None:
            yield other, near, far


def _exchanged(case: Case, routing: Routing, pairs: list[tuple[int, int, int, int]], number: int) -> Routing:
    spread = {(2 * index + 1) * case.microbatches // (2 * number) for index in range(number)}
    paths = [
        [
            [routing.holder(replica, stage, microbatch) for stage in range(case.stages)]
            for microbatch in range(case.microbatches)
        ]
        for replica in range(case.replicas)
    ]
    for stage, other, here, there in pairs:
        near, far = routing.workers[other][stage : stage + 2]
        # The shorter part of the path changes workers, which passes on fewer accumulators. No stage of it has to stay at home.
        parts = sorted((range(stage + 1, case.stages), range(stage + 1)), key=len)
        free = [one for one in parts if case.at_home.isdisjoint(one)]
        if not free:
            continue
        part = slice(free[0].start, free[0].stop)
        for microbatch in spread:
            # Shares and earlier exchanges may lead any replica's microbatch across the link, or away from the partner.
            of_replica = [path[microbatch] for path in paths]
            for ours in of_replica:
                others = [path for path in of_replica if path[stage] != here and path[stage + 1] != there]
                if ours[stage] == here and ours[stage + 1] == there and others:
                    theirs = min(others, key=lambda path: (path[stage] != near, path[stage + 1] != far))
                    ours[part], theirs[part] = theirs[part], ours[part]
    return Routing.of_paths(routing.workers, [list(map(tuple, of_microbatch)) for of_microbatch in paths])


def _load(case: Case, routing: Routing, stage: int, here: int, there: int) -> float:
    """Return how long a microbatch occupies the link between two workers, which may lie between several pairs of stages."""
    path = routing.workers[routing.replica_of(here)]
    return sum({*ends} == {here, there} for ends in pairwise(path)) * _occupancy(case, stage, here, there)


def _occupancy(case: Case, stage: int, here: int, there: int) -> float:
    """Return the longer occupancy of the two directions between workers of a stage and the next."""
    links = case.link(here, there, (stage, stage + 1)), case.link(there, here, (stage + 1, stage))
    return max(link.occupancy for link in links)


def _flight(case: Case, stage: int, here: int, there: int) -> float:
    """Return the time of a message there and of one back between workers of a stage and the next."""
    links = case.link(here, there, (stage, stage + 1)), case.link(there, here, (stage + 1, stage))
    return sum(link.latency + link.occupancy for link in links)
