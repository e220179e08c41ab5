"""Replicas that are alike are planned once: those of equal speed that compute their own microbatches and nothing else.

Of thousands of workers most are in such replicas. They all run the same orders, so one of them stands for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from adaptra.program import Op
from adaptra.program.routing import Route, Routing
from adaptra.simulation.case import Case


@dataclass(frozen=True)
class MergedJob:
    """A job in which one replica stands for all that are alike.

    Attributes:
        case: The case of the replicas that are left.
        routing: Their routing.
        groups: For each replica that is left, the replicas of the whole job for which it stands.
    """

    case: Case
    routing: Routing
    groups: tuple[tuple[int, ...], ...]

    def expand(self, orders: Sequence[Sequence[Op]], whole: Routing) -> tuple[tuple[Op, ...], ...]:
        """Return the orders of all workers of the whole job, given those of the workers that are left."""
        expanded: list[tuple[Op, ...]] = [()] * whole.ranks
        for here, group in enumerate(self.groups):
            for replica in group:
                # A replica that stands for others is on no other's route, so elsewhere each number means one replica.
                number = {index: members[0] for index, members in enumerate(self.groups)} | {here: replica}
                for stage, worker in enumerate(self.routing.workers[here]):
                    there = whole.workers[replica][stage]
                    if worker is not None and there is not None:
                        expanded[there] = tuple(_renumbered(op, number[op.replica]) for op in orders[worker])
        return tuple(expanded)


def _renumbered(op: Op, replica: int) -> Op:
    """Return an op of another replica. Of a large job most ops keep theirs, and all are met here."""
    return op if op.replica == replica else Op(op.stage, op.kind, op.microbatch, op.lane, replica)


def merge_alike(case: Case, routing: Routing) -> MergedJob:
    """Let one replica stand for all that are alike."""
    apart = _replicas_apart(case, routing)
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for replica in range(case.replicas):
        workers = range(replica * case.ranks, (replica + 1) * case.ranks)
        alike = tuple((case.slow.get(worker, 1.0), case.ports.get(worker, 0.0)) for worker in workers)
        groups[replica if replica in apart else alike].append(replica)
    kept = sorted(groups.values())
    number = {members[0]: index for index, members in enumerate(kept)}
    moved = {
        replica * case.ranks + rank: index * case.ranks + rank
        for replica, index in number.items()
        for rank in range(case.ranks)
    }
    grid = tuple(tuple(None if worker is None else moved[worker] for worker in routing.workers[replica]) for replica in number)
    routes = tuple(
        Route(number[route.replica], route.microbatches, tuple(moved[worker] for worker in route.workers))
        for route in routing.routes
        if route.replica in number
    )
    merged = replace(
        case,
        replicas=len(kept),
        slow={moved[worker]: factor for worker, factor in case.slow.items() if worker in moved},
        ports={moved[worker]: time for worker, time in case.ports.items() if worker in moved},
        links={(moved[a], moved[b]): link for (a, b), link in case.links.items()},
        lost=frozenset(moved[worker] for worker in case.lost),
        guests=frozenset(moved[worker] for worker in case.guests),
    )
    return MergedJob(merged, Routing(grid, routes, case.microbatches), tuple(map(tuple, kept)))


def _replicas_apart(case: Case, routing: Routing) -> set[int]:
    """Return the replicas that are not alike: with lost workers, links of their own, or microbatches given or taken."""
    apart = {case.replica_of(worker) for worker in case.lost | case.guests}
    apart |= {case.replica_of(worker) for ends in case.links for worker in ends}
    for route in routing.routes:
        homes = {case.replica_of(worker) for worker in route.workers}
        if homes != {route.replica}:
            apart |= homes | {route.replica}
    return apart
