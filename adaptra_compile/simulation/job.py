"""Problems as the C++ code takes them: a case with a routing, and programs whose steps end with updates."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from adaptra import _C
from adaptra.errors import CaseError
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import RULE
from adaptra.program.routing import Routing
from adaptra.simulation.case import Case, placement_lists
from adaptra.simulation.cost import CostModel


def alike_case(program: Program, cost: CostModel, *, hands_over: bool = True, changing: Collection[int] = ()) -> Case:
    """Return the case of a program of several replicas that all have the same costs; REDUCE and STEP take no time.

    A limit of memory is that of :meth:`.Case.of_replicas`. ``changing`` are the stages whose forwards change buffers.
    """
    case = Case(cost, program.microbatches, program.placement).of_replicas(program.replicas)
    return replace(case, hands_over=hands_over, changing=frozenset(changing))


def with_updates(program: Program) -> Program:
    """Return the program with all REDUCE, then all STEP at each worker's end, if it has none."""
    routing = program.routing
    if any(op.kind.is_update for order in program.orders for op in order):
        return program
    orders = list(program.orders)
    for worker in routing.live:
        replica = routing.replica_of(worker)
        updates = [
            Op(stage, kind, 0, None, replica) for kind in (Kind.REDUCE, Kind.STEP) for stage in routing.stages_of(worker)
        ]
        orders[worker] = (*orders[worker], *updates)
    return replace(program, orders=tuple(orders))


def problem_of(case: Case, routing: Routing) -> _C.Problem:
    """Return a case and a routing as the C++ code takes them."""
    holders = [
        routing.holder(replica, stage, microbatch)
        for replica in range(case.replicas)
        for stage in range(case.stages)
        for microbatch in range(case.microbatches)
    ]
    homes = [routing.replica_of(worker) if routing.stages_of(worker) else 0 for worker in range(routing.live[-1] + 1)]
    return _C.Problem(case, holders, homes, [routing.column(stage) for stage in range(case.stages)], RULE)


def pipeline_of(pipeline: Case | Program, cost: CostModel) -> _C.Problem:
    """Return one pipeline as the C++ code takes it: the placement and microbatches of a case or of a program, and costs."""
    return _C.Problem.of_pipeline(pipeline, cost, RULE)


def check_fit(program: Program, case: Case) -> Routing:
    """Check that a program is of a case's size, and return its routing.

    Raises:
        CaseError: The program and the case have different replicas, stages or microbatches, or a lost worker has ops.
    """
    routing = program.routing
    sizes = routing.replicas, program.stages, program.microbatches
    expected = case.replicas, case.stages, case.microbatches
    if sizes != expected:
        raise CaseError(
            f"{program.name} has {sizes[0]} replicas of {sizes[1]} stages and {sizes[2]} microbatches: expected "
            f"{expected[0]}, {expected[1]} and {expected[2]}, as {case.name} has"
        )
    for replica, path in enumerate(routing.workers):
        rank_of: dict[int, int] = {}
        worker_of: dict[int, int] = {}
        for rank, worker in zip(case.placement, path, strict=True):
            if worker is not None and (rank_of.setdefault(worker, rank), worker_of.setdefault(rank, worker)) != (rank, worker):
                raise CaseError(
                    f"{program.name}: worker {worker} of replica {replica} has the stages {list(routing.stages_of(worker))}: "
                    f"expected the placement {placement_lists(case.placement)}, as {case.name} has"
                )
    for worker in case.lost:
        if routing.stages_of(worker):
            raise CaseError(f"{program.name}: worker {worker} has stages, but {case.name} says that it is lost")
    return routing
