"""One program of several replicas from a program of each, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adaptra.errors import ScheduleError
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.simulation.job import with_updates


def join(programs: Sequence[Program], *, uneven: bool = False) -> Program:
    """Return the program of several replicas in which each runs its own program. REDUCE and STEP end each worker's order.

    Rank r of replica p becomes worker ``p · ranks + r``.

    Args:
        programs: One program of one pipeline per replica, compute ops only, of one placement and number of microbatches.
        uneven: Whether numbers of microbatches may differ, as batches of one measured step do. The program has the largest
            then, and nobody computes what a smaller batch lacks: it is for timelines, and can't run.

    Raises:
        ScheduleError: There is no program, one has communication ops or replicas, or two are of different pipelines.
    """
    if not programs:
        raise ScheduleError("join: no program: expected one per replica")
    first = programs[0]
    for replica, program in enumerate(programs):
        program.require_one_pipeline("join")
        if program.is_lowered:
            raise ScheduleError(f"join: {program.name} of replica {replica} has SEND and RECV ops: expected compute ops only")
        if program.placement != first.placement or (program.microbatches != first.microbatches and not uneven):
            raise ScheduleError(
                f"join: {program.name} of replica {replica} has placement {','.join(map(str, program.placement))} and "
                f"{program.microbatches} microbatches: expected those of replica 0, "
                f"{','.join(map(str, first.placement))} and {first.microbatches}"
            )
    most = max(program.microbatches for program in programs)
    routing = Routing.at_home(first.placement, len(programs), most)
    orders = tuple(
        tuple(replace(op, replica=replica) for op in order)
        for replica, program in enumerate(programs)
        for order in program.orders
    )
    return with_updates(Program(first.name, routing, orders))


def order_of_replica(program: Program, replica: int) -> Program:
    """Return the program of one pipeline that a replica runs, compute ops only: the inverse of :func:`join`.

    Raises:
        ScheduleError: The program has no such replica, or a route crosses it: others compute its microbatches, or it theirs.
    """
    routing = program.routing
    if not 0 <= replica < routing.replicas:
        raise ScheduleError(f"{program.name}: no replica {replica}: expected 0..{routing.replicas - 1}")
    if replica in crossed_replicas(routing):
        raise ScheduleError(f"{program.name}: a route crosses replica {replica}: expected one that computes its own alone")
    row = [worker for worker in routing.workers[replica] if worker is not None]
    ranks = sorted(set(row))
    orders = tuple(tuple(replace(op, replica=0) for op in program.orders[worker] if op.kind.is_compute) for worker in ranks)
    return Program.of_pipeline(program.name, tuple(map(ranks.index, row)), program.microbatches, orders)


def crossed_replicas(routing: Routing) -> frozenset[int]:
    """Return the replicas that are on a route of another one, or that have a lost worker or a route through another one."""
    crossed = {replica for replica, row in enumerate(routing.workers) if None in row}
    for route in routing.routes:
        homes = set(map(routing.replica_of, route.workers))
        if homes != {route.replica}:
            crossed |= homes | {route.replica}
    return frozenset(crossed)
