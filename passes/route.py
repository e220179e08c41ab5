"""Routes around lost workers: which live worker of a stage computes each microbatch of a lost one."""

from __future__ import annotations

from itertools import groupby

from adaptra.program.routing import Route, Routing
from adaptra.simulation.job_case import JobCase


def route_around_lost(case: JobCase) -> Routing:
    """Return the routing in which each stage's live workers share the microbatches of its lost ones evenly.

    If the accumulator of weight gradients is handed over, each live worker takes one contiguous block, so that there are few
    hand-overs. Otherwise they take turns, which finds shorter periods where microbatches are few. The shares of a stage's
    workers differ by one microbatch at most.

    After SlipStream's rerouting, which always takes turns.
    """
    grid = tuple(
        tuple(None if (worker := case.worker(replica, stage)) in case.lost else worker for stage in range(case.stages))
        for replica in range(case.replicas)
    )
    holders = [_holders(case, stage) for stage in range(case.stages)]
    routes: list[Route] = []
    for replica in range(case.replicas):
        first = replica * case.microbatches
        paths = [tuple(holder[first + microbatch] for holder in holders) for microbatch in range(case.microbatches)]
        for path, group in groupby(range(case.microbatches), key=paths.__getitem__):
            microbatches = list(group)
            routes.append(Route(replica, range(microbatches[0], microbatches[-1] + 1), path))
    return Routing(grid, tuple(routes), case.microbatches)


def _holders(case: JobCase, stage: int) -> list[int]:
    """Return the worker of each microbatch on a stage, replica by replica."""
    workers = [case.worker(replica, stage) for replica in range(case.replicas)]
    live = [worker for worker in workers if worker not in case.lost]
    foreign = case.microbatches * (len(workers) - len(live))
    holders: list[int] = []
    taken = 0
    for worker in workers:
        if worker not in case.lost:
            holders += [worker] * case.microbatches
            continue
        for number in range(taken, taken + case.microbatches):
            holders.append(live[number * len(live) // foreign if case.hands_over else number % len(live)])
        taken += case.microbatches
    return holders
