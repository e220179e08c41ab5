"""The planner of several replicas: routes around what is lost, slow or narrow, and orders with the shortest period."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from adaptra import _C
from adaptra.errors import PlanError
from adaptra.passes.detour import detours
from adaptra.passes.route import share_evenly
from adaptra.planning.replicas.alike_replicas import MergedJob, merge_alike
from adaptra.planning.replicas.period_bound import PeriodBoundKind, period_bound
from adaptra.program import Op, Program
from adaptra.program.routing import Routing
from adaptra.simulation.job_case import JobCase
from adaptra.simulation.period import KINDS, job_of

EFFORT: Final = 3_000_000
"""The search's effort without a budget, in ops scheduled: a tenth of a second to a few tenths."""


_UNLIMITED: Final = 10**15


def plan_job(
    case: JobCase,
    *,
    effort: int | None = None,
    budget: float | None = None,
    seed: int = 0,
    routing: Routing | None = None,
) -> Program:
    """Find the program of several replicas with the shortest period that the search finds.

    Without a budget the same arguments give the same program on every machine.

    Args:
        case: The case, with lost and slow workers.
        effort: About how many ops to schedule; :data:`EFFORT` by default, and no limit with a budget.
        budget: Seconds to search. A first program is found even with the shortest budget.
        seed: Seed of all random choices.
        routing: The routing to use; by default the best of those that the planner knows.

    Raises:
        PlanError: The budget is not above 0, or no order was found that keeps the case's memory limit.
    """
    if budget is not None and not budget > 0:
        raise PlanError(f"budget of {budget} seconds: expected a positive number")
    routings = _routings(case) if routing is None else [routing]
    effort = (effort or (EFFORT if budget is None else _UNLIMITED)) // len(routings)
    share = None if budget is None else budget / len(routings)
    best: tuple[float, list[bytes], MergedJob, Routing] | None = None
    for one in routings:
        enough = period_bound(case, one).value
        merged = merge_alike(case, one)
        job, memory = job_of(merged.case, merged.routing), _memory(merged.case, merged.routing)
        found = _C.search_period(job, memory, effort, seed, share, enough)
        if found is not None and (best is None or found[0] < best[0]):
            best = (*found, merged, one)
        if best is not None and best[0] <= enough * (1 + 1e-9):
            break
    if best is None:
        raise PlanError(
            f"mem_cap {list(case.memory or ())}: found no order in which no worker waits forever: expected room for more "
            "microbatches on the workers that compute those of others"
        )
    _, orders, merged, chosen = best
    return Program("adapted", (), case.microbatches, merged.expand([_unpacked(order) for order in orders], chosen), chosen)


def _routings(case: JobCase) -> list[Routing]:
    shared = [share_evenly(case, in_turns=in_turns) for in_turns in (False, True)]
    return list(dict.fromkeys((*_detoured(case, shared[0]), *shared)))


def _detoured(case: JobCase, routing: Routing) -> Iterator[Routing]:
    """Yield routings with detours, if a link binds."""
    bound = period_bound(case, routing)
    if bound.kind is PeriodBoundKind.LINK:
        free = replace(case, cost=replace(case.cost, occupancy_forward=_none(case), occupancy_backward=_none(case)), links={})
        yield from detours(case, routing, period_bound(free, routing).value)


def _none(case: JobCase) -> tuple[float, ...]:
    return (0.0,) * (case.stages - 1)


def _memory(case: JobCase, routing: Routing) -> list[int]:
    """Return the most microbatches that each worker may hold."""
    everything = case.replicas * case.microbatches * case.stages
    if case.memory is None:
        return [everything] * (routing.live[-1] + 1)
    memory = case.memory
    held = [[memory[stage] for stage in routing.stages_of(worker)] for worker in range(routing.live[-1] + 1)]
    return [max(limits, default=everything) for limits in held]


def _unpacked(order: bytes) -> tuple[Op, ...]:
    return tuple(
        Op(stage, KINDS[code], microbatch, None, replica)
        for replica, stage, code, microbatch in struct.iter_unpack("=4i", order)
    )
