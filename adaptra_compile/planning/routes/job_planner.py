"""The planner of several replicas: routes around what is lost, slow or narrow, and orders with the shortest period."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

from adaptra import _C
from adaptra.errors import PlanError
from adaptra.planning.routes.alike_replicas import MergedJob, merge_alike
from adaptra.planning.routes.detour import detours
from adaptra.planning.routes.period_bound import period_bound
from adaptra.planning.routes.route import share_evenly
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.simulation.case import Case
from adaptra.simulation.job import problem_of

EFFORT: Final = 3_000_000
"""The search's effort without a budget, in ops scheduled: a tenth of a second to a few tenths."""

_UNLIMITED: Final = 10**15
_SEARCHED: Final = 0.9
"""The part of a budget after which the search ends, so that the program is made within the rest."""
_LEAST: Final = 1e-6
_MOST_TRIES: Final = 12
_NARROW: Final = (1.0, 0.5)
"""Parts of the period for which messages may occupy a link before detours are tried. A busy link delays messages in queues."""
_PAUSES: Final = 12
"""The number of pauses of slow workers and narrow ports for which shares are compared."""
_SMALL: Final = 4096
"""Workers times microbatches of the largest jobs for which they are compared."""


def plan_job(
    case: Case,
    *,
    effort: int | None = None,
    budget: float | None = None,
    seed: int = 0,
    routing: Routing | Sequence[Routing] = (),
) -> Program:
    """Find the program of several replicas with the shortest period that the search finds.

    Without a budget the same arguments give the same program on every machine.

    Args:
        case: The case, with lost and slow workers.
        effort: About how many ops to schedule; :data:`EFFORT` by default, and no limit with a budget.
        budget: Seconds to search. A first program is found even with the shortest budget.
        seed: Seed of all random choices.
        routing: The routing to use, or several of which the best is used; by default those that the planner knows.

    Raises:
        PlanError: The budget is not above 0, or no order was found that keeps the case's memory limit.
    """
    if budget is not None and not budget > 0:
        raise PlanError(f"budget of {budget} seconds: expected a positive number")
    case.check_edges()
    _check_room(case)
    ends = None if budget is None else time.perf_counter() + _SEARCHED * budget
    effort = effort or (EFFORT if budget is None else _UNLIMITED)
    tries = _tries(case, [routing] if isinstance(routing, Routing) else routing or _known(case))
    best: _Try | None = None
    # Each routing for a while, and then the best ones for longer.
    for turn, (number, part) in enumerate(((len(tries), 0.4), (4, 0.5), (2, 1.0))):
        tries = sorted(tries, key=lambda one: (one.period, one.bound))[:number]
        for index, attempt in enumerate(tries):
            if best is not None and best.period <= attempt.bound * (1 + 1e-9):
                continue
            share = part / (len(tries) - index if budget is not None else len(tries))
            seconds = None if ends is None else max(share * (ends - time.perf_counter()), _LEAST)
            attempt.search(int(effort * share), seed + (turn << 32), seconds)
            if best is None or attempt.period < best.period:
                best = attempt
    if best is None or best.orders is None:
        raise PlanError(
            f"mem_cap {list(case.memory or ())}: found no order in which no worker waits forever: expected room for more "
            "microbatches on the workers that compute those of others"
        )
    orders = best.merged.expand([best.orders.of(worker) for worker in range(best.merged.routing.live[-1] + 1)], best.routing)
    return Program("adapted", best.routing, orders)


def _check_room(case: Case) -> None:
    """Refuse memory in which a microbatch can't be on each stage of a worker at once."""
    for rank, room in enumerate(case.memory or ()):
        stages = case.placement.count(rank)
        if room < stages:
            raise PlanError(
                f"mem_cap {list(case.memory or ())}: room for {room} on rank {rank}: expected at least {stages}, as many "
                "microbatches as it has stages"
            )


class _Try:
    """A routing, its bound, and the shortest period found for it."""

    def __init__(self, case: Case, routing: Routing, bound: float) -> None:
        self.routing = routing
        self.bound = bound
        self.period = math.inf
        self.orders: _C.Orders | None = None
        self._case = case

    @cached_property
    def merged(self) -> MergedJob:
        """The job in which replicas that are alike are one."""
        return merge_alike(self._case, self.routing)

    @cached_property
    def _problem(self) -> tuple[_C.Problem, list[int]]:
        case, routing = self.merged.case, self.merged.routing
        return problem_of(case, routing), _memory(case, routing)

    def search(self, effort: int, seed: int, seconds: float | None) -> None:
        """Search orders, and keep them if their period is the shortest."""
        found = _C.search_period(*self._problem, effort, seed, seconds, self.bound)
        if found is not None and found[0] < self.period:
            self.period, self.orders = found


def _tries(case: Case, routings: Sequence[Routing]) -> list[_Try]:
    """Return the routings to search, those with the least bounds."""
    bounded = [(routing, period_bound(case, routing).value) for routing in dict.fromkeys(routings)]
    return [_Try(case, *one) for one in sorted(bounded, key=lambda one: one[1])[:_MOST_TRIES]]


def _known(case: Case) -> list[Routing]:
    """Return the routings that the planner knows."""
    blocks = share_evenly(case, in_turns=False)
    return [*detoured(case, blocks), blocks, *shares(case, in_turns=True)]


def shares(case: Case, *, in_turns: bool) -> list[Routing]:
    """Return routings around lost and slow workers and narrow ports: with a pause of slow workers, and the first without.

    Args:
        case: The case.
        in_turns: As of :func:`adaptra.planning.routes.route.share_evenly`.
    """
    routings = [share_evenly(case, in_turns=in_turns)]
    narrow = _with_narrow_ports(case)
    if (narrow.ports or case.slow) and case.workers * case.microbatches <= _SMALL:
        once = _once(narrow)
        routings += [share_evenly(narrow, in_turns=in_turns, pause=once * part / _PAUSES) for part in range(1, _PAUSES + 1)]
    return list(dict.fromkeys(routings))


def _with_narrow_ports(case: Case) -> Case:
    """Return the case in which a worker has a narrow port whose links to all workers of the next stages are narrow."""
    ports = dict(case.ports)
    live = {worker for row in case.grid for worker in row if worker is not None}
    for worker in {end for ends in case.links for end in ends} & live:
        occupancies = [
            max(case.link(worker, other, (stage, near)).occupancy, case.link(other, worker, (near, stage)).occupancy)
            for stage in case.stages_of(worker)
            for near in (stage - 1, stage + 1)
            if 0 <= near < case.stages
            for other in (case.worker(replica, near) for replica in range(case.replicas))
            if other in live and other != worker
        ]
        if occupancies and min(occupancies) > ports.get(worker, 0.0):
            ports[worker] = min(occupancies)
    return replace(case, ports=ports)


def _once(case: Case) -> float:
    """Return the time of a step of one microbatch through the slowest workers and ports, from its first F to its last STEP."""
    cost = case.cost
    ops = sum(map(sum, zip(cost.forward, cost.input_grad, cost.weight_grad, case.step, case.reduce, strict=True)))
    edges = zip(cost.latency_forward, cost.latency_backward, cost.occupancy_forward, cost.occupancy_backward, strict=True)
    return ops + sum(map(sum, edges)) + 4 * max(case.ports.values(), default=0.0)


def detoured(case: Case, routing: Routing) -> Iterator[Routing]:
    """Yield routings with detours, if messages occupy a link for a good part of the period.

    Args:
        case: The case.
        routing: The routing without detours.
    """
    if not any(link.occupancy for link in case.links.values()) and not any(
        (*case.cost.occupancy_forward, *case.cost.occupancy_backward)
    ):
        return
    free = replace(case, cost=replace(case.cost, occupancy_forward=_none(case), occupancy_backward=_none(case)), links={})
    limit = period_bound(free, routing).value
    for part in _NARROW:
        yield from detours(case, routing, limit * part)


def _none(case: Case) -> tuple[float, ...]:
    return (0.0,) * (case.stages - 1)


def _memory(case: Case, routing: Routing) -> list[int]:
    """Return the most microbatches that each worker may hold."""
    everything = case.replicas * case.microbatches * case.stages
    if case.memory is None:
        return [everything] * (routing.live[-1] + 1)
    memory = case.memory
    return [memory[worker % case.ranks] for worker in range(routing.live[-1] + 1)]
