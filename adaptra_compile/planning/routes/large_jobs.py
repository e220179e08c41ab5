"""Plans of large jobs: one healthy replica is planned, and microbatches of lost workers are inserted into its orders.

Of ten thousand workers, all replicas with lost ones and all that compute their microbatches differ from each other. A search
for all their orders at once takes minutes. Here each replica is timed by itself; ``csrc/schedule/replicas/insert_foreign.h``
says why that is right. A plan's orders are made when they are asked for, so nobody holds those of all workers.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Final

from adaptra import _C
from adaptra.planning.routes.period_bound import period_bound
from adaptra.program import Op, Program
from adaptra.program.placement import is_straight
from adaptra.program.program import lines_of
from adaptra.program.routing import Route, Routing
from adaptra.simulation.bound import Bound
from adaptra.simulation.case import Case
from adaptra.simulation.job import problem_of

LARGE: Final = 1_000_000
"""Ops F, I and W of a step from which on a job is planned this way."""

_EFFORT: Final = 200_000
"""The search's effort for one replica, in ops scheduled. It ends much earlier if it reaches its bound."""
_NAME: Final = "adapted"
_NEAR: Final = 1.03
"""How much longer than the work of the busiest worker a good period is at most."""
_ROOMY: Final = 4
"""How often the room for guests and put-off W must fit into memory for a plan that keeps it free to be good."""
_SLACKS: Final = (0.5, 1.0, 2.0)
"""How much later than on a free worker an op of a lost one may end, in times of F, I and W together."""


@dataclass(frozen=True)
class LargePlan:
    """A plan whose orders are made on demand.

    Attributes:
        case: The case.
        routing: The routes.
        period: Steps are at most this far apart, in the case's unit.
    """

    case: Case
    routing: Routing
    period: float
    _healthy: _C.Orders
    _homes: Mapping[int, _C.Orders]
    _hosts: tuple[Mapping[int, int], _C.Orders]  # of each worker that computes others' microbatches, the place of its order

    @cached_property
    def bound(self) -> Bound:
        """The lower bound of the period under the routes."""
        return period_bound(self.case, self.routing)

    @cached_property
    def held(self) -> int:
        """The most microbatches that a worker holds."""
        each = (1.0,) * self.case.stages
        counting = replace(self.case.cost, memory_forward=each, memory_input_grad=(0.0,) * self.case.stages)
        held = [*_C.peaks(counting, self._healthy)[1], *_C.peaks(counting, self._hosts[1])[1]]
        for replica, orders in self._homes.items():
            of_home = enumerate(_C.peaks(counting, orders)[1])
            held += [most for stage, most in of_home if self.case.worker(replica, stage) not in self.case.lost]
        return round(max(held))

    def __str__(self) -> str:
        """Return the text form of the program."""
        return "".join(lines_of(_NAME, self.routing, self.order_of))

    def order_of(self, worker: int) -> tuple[Op, ...]:
        """Return the order of a worker, empty if it is lost."""
        if worker in self.case.lost:
            return ()
        replica, stage = divmod(worker, self.case.stages)
        places, orders = self._hosts
        if worker in places:
            return orders.of(places[worker])
        return self._homes.get(replica, self._healthy).of(stage, replica)

    def program(self) -> Program:
        """Return the program of all workers. A million ops take about half a gigabyte."""
        orders = tuple(map(self.order_of, range(self.routing.live[-1] + 1)))
        return Program(_NAME, self.routing, orders)


def plan_large(case: Case, *, budget: float | None = None) -> LargePlan | None:
    """Plan a large job: most replicas whole, and no slow workers, buffers that change, narrow links or any of their own.

    Without a budget the first plan is returned that is near the work of the busiest worker, or the best of all tries. It is the
    same on every machine.

    Args:
        case: The case.
        budget: Seconds after which nothing better is looked for.

    Returns:
        The plan, or None if the case is another one or memory has no room for microbatches of others.
    """
    case.check_edges()
    homes = _lost_stages(case)
    hosts = [replica for replica in range(case.replicas) if replica not in homes]
    if 2 * len(hosts) < case.replicas or not _is_uniform(case):
        return None
    end = None if budget is None else time.monotonic() + budget
    inserter = _Inserter(case, homes, _spread(case, homes, hosts))
    best: LargePlan | None = None
    for reserve, slack in product(inserter.reserves(), _SLACKS if homes else _SLACKS[:1]):
        found = inserter.plan(reserve, slack)
        if found is not None and (best is None or found.period < best.period):
            best = found
        if best is not None and (best.period <= inserter.near if end is None else time.monotonic() >= end):
            break
    return best


def _is_uniform(case: Case) -> bool:
    occupied = any((*case.cost.occupancy_forward, *case.cost.occupancy_backward))
    return is_straight(case.placement) and not (
        case.barrier or case.slow or case.ports or case.links or case.changing or occupied
    )


def is_large(case: Case) -> bool:
    """Return whether a step has so many ops that a search for all orders at once takes too long."""
    return 3 * case.replicas * case.stages * case.microbatches >= LARGE


def _lost_stages(case: Case) -> dict[int, tuple[int, ...]]:
    """Return the lost stages of each replica that has any."""
    lost_stages: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    for worker in sorted(case.lost):
        lost_stages[worker // case.stages] += (worker % case.stages,)
    return dict(lost_stages)


def _spread(case: Case, homes: Mapping[int, Sequence[int]], hosts: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Return home, stage, microbatch and host of each microbatch of a lost worker.

    Hosts take turns, from stage to stage. If accumulators are handed over, each takes neighbouring microbatches.
    """
    foreign: list[tuple[int, int, int, int]] = []
    turn = 0
    for stage in range(case.stages):
        microbatches = [(home, m) for home, lost in homes.items() if stage in lost for m in range(case.microbatches)]
        block = math.ceil(len(microbatches) / len(hosts)) if case.hands_over else 1
        foreign += [
            (home, stage, m, hosts[(turn + index // max(block, 1)) % len(hosts)])
            for index, (home, m) in enumerate(microbatches)
        ]
        turn += math.ceil(len(microbatches) / max(block, 1))
    return foreign


def _routing(case: Case, homes: Mapping[int, Sequence[int]], foreign: Sequence[tuple[int, int, int, int]]) -> Routing:
    host_of = {(home, stage, microbatch): host for home, stage, microbatch, host in foreign}
    everything = range(case.microbatches)
    routes: list[Route] = []
    for replica in range(case.replicas):
        path = [case.worker(replica, stage) for stage in range(case.stages)]
        if replica not in homes:
            routes.append(Route(replica, everything, tuple(path)))
            continue
        for microbatch in everything:
            for stage in homes[replica]:
                path[stage] = case.worker(host_of[replica, stage, microbatch], stage)
            routes.append(Route(replica, range(microbatch, microbatch + 1), tuple(path)))
    return Routing(case.grid, tuple(routes), case.microbatches)


class _Inserter:
    """Plans of one case with different amounts of memory kept free, and different slacks."""

    def __init__(self, case: Case, homes: Mapping[int, tuple[int, ...]], foreign: Sequence[tuple[int, int, int, int]]) -> None:
        self._case = case
        self._homes = homes
        self._foreign = foreign
        self._routing = _routing(case, homes, foreign)
        self._pipeline = replace(case, replicas=1, lost=frozenset(), memory=None)
        self._memory = list(case.memory or (case.replicas * case.microbatches,) * case.stages)
        self._planned: dict[object, tuple[float, _C.Orders] | None] = {}

    @cached_property
    def _guests(self) -> list[int]:
        """The most microbatches of others that a worker computes, per stage."""
        guests = Counter((stage, host) for _, stage, _, host in self._foreign)
        return [max((n for (at, _), n in guests.items() if at == stage), default=0) for stage in range(self._case.stages)]

    @property
    def near(self) -> float:
        """A period that is a little longer than the work of the busiest worker."""
        case, cost = self._case, self._case.cost
        ops = map(sum, zip(cost.forward, cost.input_grad, cost.weight_grad, strict=True))
        stages = zip(self._guests, ops, case.step, case.reduce, strict=True)
        return _NEAR * max((case.microbatches + guests) * once + step + reduce for guests, once, step, reduce in stages)

    def reserves(self) -> Iterator[tuple[int, ...]]:
        """Yield, per stage, room that hosts keep free: for guests, and mostly for W that are put off for them as well.

        What is most likely good comes first. Where memory is tight, that is room for guests only.
        """
        case, most = self._case, self._guests
        ops = zip(most, case.cost.forward, case.cost.input_grad, case.cost.weight_grad, strict=True)
        full = [
            count + (math.ceil(count * (forward + input_grad) / weight_grad) if weight_grad > 0 else 0)
            for count, forward, input_grad, weight_grad in ops
        ]
        found = [(max(one),) * case.stages for one in (full, most)] + [tuple(one) for one in (full, most)]
        is_tight = min(self._memory) < _ROOMY * max(full)
        yield from dict.fromkeys(sorted(found, key=sum) if is_tight else found)

    def plan(self, reserve: Sequence[int], slack: float) -> LargePlan | None:
        """Return a plan with some memory kept free and some slack, or None if one of them is too little."""
        case = self._case
        healthy = self._orders(self._pipeline, [max(1, most - kept) for most, kept in zip(self._memory, reserve, strict=True)])
        if healthy is None or not case.lost:
            return healthy and LargePlan(case, self._routing, healthy[0], healthy[1], {}, ({}, healthy[1]))
        of_homes: dict[int, _C.Orders] = {}
        for replica, lost in self._homes.items():
            free = case.replicas * case.microbatches
            memory = [free if stage in lost else most for stage, most in enumerate(self._memory)]
            home = self._orders(_answering(self._pipeline, lost, slack), memory)
            if home is None:
                return None
            of_homes[replica] = home[1]
        problem = problem_of(self._pipeline, Routing.healthy(1, case.stages, case.microbatches))
        insertion = _C.insert_foreign(problem, healthy[1], list(of_homes.items()), self._foreign, self._memory, slack)
        if insertion is None:
            return None
        period, places, orders = insertion
        hosts = {case.worker(*place): index for index, place in enumerate(places)}
        return LargePlan(case, self._routing, period, healthy[1], of_homes, (hosts, orders))

    def _orders(self, pipeline: Case, memory: list[int]) -> tuple[float, _C.Orders] | None:
        """Return the period and the orders of one replica, searched once for each pipeline and memory."""
        key = pipeline.cost, tuple(memory)
        if key not in self._planned:
            routing = Routing.healthy(1, pipeline.stages, pipeline.microbatches)
            enough = period_bound(replace(pipeline, memory=tuple(memory)), routing).value
            self._planned[key] = _C.search_period(problem_of(pipeline, routing), memory, _EFFORT, 0, None, enough)
        return self._planned[key]


def _answering(pipeline: Case, lost: Sequence[int], slack: float) -> Case:
    """Return the pipeline with lost workers that take no time, and messages from them that take their ops' and the slack."""
    cost = pipeline.cost
    ops = [list(cost.forward), list(cost.input_grad), list(cost.weight_grad)]
    forward, backward = list(cost.latency_forward), list(cost.latency_backward)
    for stage in lost:
        more = slack * sum(times[stage] for times in ops)
        down, up = (times[stage] + more for times in ops[:2])
        if stage + 1 < pipeline.stages:
            forward[stage] += down
        else:
            up += down
        if stage > 0:
            backward[stage - 1] += up
        for times in ops:
            times[stage] = 0.0
    changed = replace(
        cost,
        forward=tuple(ops[0]),
        input_grad=tuple(ops[1]),
        weight_grad=tuple(ops[2]),
        latency_forward=tuple(forward),
        latency_backward=tuple(backward),
    )
    return replace(pipeline, cost=changed)
