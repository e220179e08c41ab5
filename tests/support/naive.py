"""Slow, obvious versions of what adaptra does fast, for tests to compare with."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import count

from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import Need, needs
from adaptra.simulation.cost import Blocking, CostModel


def neighbour_waiting(op: Op, stages: int) -> int | None:
    """The stage that a compute op sends its output to."""
    match op.kind:
        case Kind.F:
            return op.stage + 1 if op.stage + 1 < stages else None
        case Kind.I | Kind.B:
            return op.stage - 1 if op.stage > 0 else None
        case Kind.W | Kind.SEND_F | Kind.RECV_F | Kind.SEND_B | Kind.RECV_B:
            return None


def simulate_by_iteration(program: Program, cost: CostModel) -> dict[Op, tuple[float, float]]:
    """Start and end of every op, as the fixed point of the definition.

    Every start is computed anew from all times of the round before, until nothing changes. Causes come before effects, so every
    round is right for a longer stretch of time than the one before. Needs a program without deadlock and, where edges are
    shared or communication blocks, ops that take time.
    """
    previous: dict[Op, tuple[float, float]] = {op: (0.0, 0.0) for order in program.orders for op in order}
    for _ in range(4 * len(previous) + 10):
        times = _one_round(program, cost, previous)
        if times == previous:
            return times
        previous = times
    raise AssertionError("no fixed point")


def _one_round(program: Program, cost: CostModel, previous: dict[Op, tuple[float, float]]) -> dict[Op, tuple[float, float]]:
    windows = messages(program, cost, previous)
    times: dict[Op, tuple[float, float]] = {}
    for rank, order in enumerate(program.orders):
        now = 0.0
        received = [w for op, w in windows.items() if program.placement[neighbour_waiting(op, program.stages) or 0] == rank]
        for op in order:
            start = now
            for need in needs(op, program.placement, lowered=False):
                for producer in (Op(need.stage, kind, need.microbatch) for kind in need.kinds):
                    if producer in previous:
                        start = max(start, previous[producer][1] if need.stage == op.stage else windows[producer][1])
            if cost.blocking is Blocking.BOTH:
                while held := [arrived for departed, arrived in received if departed <= start < arrived]:
                    start = max(held)
            now = start + cost.duration(op.stage, op.kind)
            times[op] = (start, now)
            if cost.blocking is not Blocking.NONE and op in windows:
                now = max(now, windows[op][1])
    return times


def messages(program: Program, cost: CostModel, times: dict[Op, tuple[float, float]]) -> dict[Op, tuple[float, float]]:
    """When the message of each op that sends one departs and arrives, given when the ops run."""
    queues: dict[object, list[tuple[float, bool, int, Op]]] = defaultdict(list)
    for order in program.orders:
        for index, op in enumerate(order):
            neighbour = neighbour_waiting(op, program.stages)
            if neighbour is not None:
                backward = neighbour < op.stage
                edge = min(neighbour, op.stage)
                queues[edge if cost.half_duplex else (edge, backward)].append((times[op][1], backward, index, op))
    found: dict[Op, tuple[float, float]] = {}
    for queue in queues.values():
        free = 0.0
        for posted, backward, _, op in sorted(queue, key=lambda entry: entry[:3]):
            edge = op.stage - 1 if backward else op.stage
            departed = max(posted, free)
            free = departed + (cost.occupancy_backward if backward else cost.occupancy_forward)[edge]
            found[op] = (departed, free + (cost.latency_backward if backward else cost.latency_forward)[edge])
    return found


def random_program(seed: int, placement: Sequence[int], microbatches: int, *, forward_only: bool = False) -> Program:
    """A program without deadlock whose ranks run any op that is ready, with B or I and W for each microbatch."""
    chance = random.Random(seed)
    waiting: list[Op] = []
    for stage in range(len(placement)):
        for microbatch in range(microbatches):
            waiting.append(Op(stage, Kind.F, microbatch))
            if forward_only:
                continue
            kinds = (Kind.B,) if chance.random() < 0.3 else (Kind.I, Kind.W)
            waiting += [Op(stage, kind, microbatch) for kind in kinds]
    orders: list[list[Op]] = [[] for _ in range(max(placement) + 1)]
    done: set[Op] = set()
    while waiting:
        ready = [op for op in waiting if all(_met(need, done) for need in needs(op, placement, lowered=False))]
        op = chance.choice(ready)
        waiting.remove(op)
        done.add(op)
        orders[placement[op.stage]].append(op)
    return Program("random", tuple(placement), microbatches, tuple(map(tuple, orders)))


def _met(need: Need, done: set[Op]) -> bool:
    return any(Op(need.stage, kind, need.microbatch) in done for kind in need.kinds)


def greedy(cost: CostModel, microbatches: int, quotas: Sequence[int]) -> Program:
    """The published rule, one stage per rank, over edges without occupancy.

    Each stage runs forwards until its quota, then whichever op has its inputs: I before F before W.
    """
    stages = cost.stages
    there: dict[Op, float] = {Op(0, Kind.F, microbatch): 0.0 for microbatch in range(microbatches)}
    free = [0.0] * stages
    orders: list[list[Op]] = [[] for _ in range(stages)]
    serial = count()
    while any(len(order) < 3 * microbatches for order in orders):
        start, _, stage, op = min(
            (start, next(serial), stage, op)
            for stage in range(stages)
            if (choice := _choose(there, free[stage], orders[stage], stage, quotas[stage])) is not None
            for start, op in (choice,)
        )
        end = free[stage] = start + cost.duration(stage, op.kind)
        del there[op]
        orders[stage].append(op)
        if op.kind is Kind.F and stage + 1 < stages:
            there[Op(stage + 1, Kind.F, op.microbatch)] = end + cost.latency_forward[stage]
        elif op.kind is Kind.F:
            there[Op(stage, Kind.I, op.microbatch)] = end
        elif op.kind is Kind.I:
            there[Op(stage, Kind.W, op.microbatch)] = end
            if stage > 0:
                there[Op(stage - 1, Kind.I, op.microbatch)] = end + cost.latency_backward[stage - 1]
    return Program("greedy", tuple(range(stages)), microbatches, tuple(map(tuple, orders)))


def _choose(there: dict[Op, float], free: float, order: list[Op], stage: int, quota: int) -> tuple[float, Op] | None:
    warming_up = len(order) < quota
    mine = [(max(free, since), op) for op, since in there.items() if op.stage == stage]
    mine = [(start, op) for start, op in mine if not warming_up or op.kind is Kind.F]
    rank = {Kind.I: 0, Kind.F: 1, Kind.W: 2}
    return min(mine, key=lambda choice: (choice[0], rank[choice[1].kind], choice[1].microbatch), default=None)
