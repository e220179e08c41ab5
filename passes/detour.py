"""Detours round narrow and late links: microbatches that cross to another replica's workers, and as many that cross back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from adaptra.program.routing import Routing
from adaptra.simulation.job_case import JobCase

_MOST_CHOICES = 4
"""The most numbers of detours that are tried."""


def detours(case: JobCase, routing: Routing, limit: float) -> Iterator[Routing]:
    """Yield routings in which fewer messages cross each narrow link, with the fewest detours first.

    Two replicas exchange the rest of the path for some microbatches each, so that every worker computes as many as before.
    These microbatches are spread over the step. A link is narrow if its messages occupy it for longer than ``limit``.

    Args:
        case: The case.
        routing: The routing without detours.
        limit: The period that other bounds allow, in the case's unit.
    """
    pairs = _pairs(case, routing, limit)
    if not pairs:
        return
    longest = max(_load(case, routing, stage, worker, after) for stage, _, worker, after in pairs)
    least = max(case.microbatches - math.floor(limit / longest), 1)
    step = max(1, math.ceil((case.microbatches - least) / (_MOST_CHOICES - 1)))
    for number in (*range(least, case.microbatches, step), case.microbatches):
        yield _exchanged(case, routing, pairs, number)


def around_links(case: JobCase, routing: Routing) -> Routing | None:
    """Return the routing in which no microbatch crosses a link worse than those to another replica; None if there is none.

    A link is worse if a message there and one back take longer. Two replicas exchange paths for all microbatches. So no
    accumulator of weight gradients passes from one worker to another within a step.

    Args:
        case: The case.
        routing: The routing without detours.
    """
    pairs: list[tuple[int, int, int, int]] = []
    taken: set[tuple[int, int]] = set()
    for replica, path in enumerate(routing.workers):
        for stage, (here, there) in enumerate(pairwise(path)):
            if here is None or there is None or (replica, stage) in taken or not {(here, there), (there, here)} & {*case.links}:
                continue
            partners = [
                (max(_flight(case, stage, here, far), _flight(case, stage, near, there)), other)
                for other, near, far in _partners(routing, replica, stage)
                if (other, stage) not in taken
            ]
            if partners and min(partners)[0] < _flight(case, stage, here, there):
                other = min(partners)[1]
                taken |= {(replica, stage), (other, stage)}
                pairs.append((stage, other, here, there))
    return _exchanged(case, routing, pairs, case.microbatches) if pairs else None


def _pairs(case: JobCase, routing: Routing, limit: float) -> list[tuple[int, int, int, int]]:
    """Return the detours: the stage behind which two replicas exchange paths, the partner, and the ends of the narrow link."""
    found: list[tuple[int, int, int, int]] = []
    taken: set[tuple[int, int]] = set()
    for replica, path in enumerate(routing.workers):
        for stage in range(case.stages - 1):
            here, there = path[stage], path[stage + 1]
            if here is None or there is None or (replica, stage) in taken:
                continue
            if case.microbatches * _load(case, routing, stage, here, there) <= limit:
                continue
            partners = [
                (max(_occupancy(case, stage, here, far), _occupancy(case, stage, near, there)), other)
                for other, near, far in _partners(routing, replica, stage)
                if (other, stage) not in taken
            ]
            if partners:
                _, other = min(partners)
                taken |= {(replica, stage), (other, stage)}
                found.append((stage, other, here, there))
    return found


def _partners(routing: Routing, replica: int, stage: int) -> Iterator[tuple[int, int, int]]:
    """Yield the other replicas whose workers of a stage and the next live, with these workers."""
    for other, row in enumerate(routing.workers):
        near, far = row[stage], row[stage + 1]
        if other != replica and near is not None and far is not None:
            yield other, near, far


def _exchanged(case: JobCase, routing: Routing, pairs: list[tuple[int, int, int, int]], number: int) -> Routing:
    spread = {(2 * index + 1) * case.microbatches // (2 * number) for index in range(number)}
    paths = [
        [
            [routing.holder(replica, stage, microbatch) for stage in range(case.stages)]
            for microbatch in range(case.microbatches)
        ]
        for replica in range(case.replicas)
    ]
    for stage, other, here, _ in pairs:
        near = routing.workers[other][stage]
        # The shorter part of the path changes workers, which passes on fewer accumulators.
        part = slice(stage + 1) if stage + 1 < case.stages - stage - 1 else slice(stage + 1, None)
        for microbatch in spread:
            # Earlier exchanges may have led another replica's microbatch here.
            through: dict[int | None, list[int]] = {path[microbatch][stage]: path[microbatch] for path in paths}
            if (ours := through.get(here)) is not None and (theirs := through.get(near)) is not None:
                ours[part], theirs[part] = theirs[part], ours[part]
    return Routing.of_paths(routing.workers, [list(map(tuple, of_microbatch)) for of_microbatch in paths])


def _load(case: JobCase, routing: Routing, stage: int, here: int, there: int) -> float:
    """Return how long a microbatch occupies the link between two workers, which may lie between several pairs of stages."""
    path = routing.workers[routing.replica_of(here)]
    return sum({*ends} == {here, there} for ends in pairwise(path)) * _occupancy(case, stage, here, there)


def _occupancy(case: JobCase, stage: int, here: int, there: int) -> float:
    """Return the longer occupancy of the two directions between workers of a stage and the next."""
    links = case.link(here, there, (stage, stage + 1)), case.link(there, here, (stage + 1, stage))
    return max(link.occupancy for link in links)


def _flight(case: JobCase, stage: int, here: int, there: int) -> float:
    """Return the time of a message there and of one back between workers of a stage and the next."""
    links = case.link(here, there, (stage, stage + 1)), case.link(there, here, (stage + 1, stage))
    return sum(link.latency + link.occupancy for link in links)
