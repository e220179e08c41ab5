"""Slow, obvious versions of what adaptra does fast, for tests to compare with."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import Need, needs
from adaptra.simulation.case import Case, WorkerLink
from adaptra.simulation.cost import Blocking, CostModel


def neighbour_waiting(op: Op, stages: int) -> int | None:
    """The stage that a compute op sends its output to."""
    match op.kind:
        case Kind.F:
            return op.stage + 1 if op.stage + 1 < stages else None
        case Kind.I | Kind.B:
            return op.stage - 1 if op.stage > 0 else None
        case _:
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
            for need in needs(op, program, lowered=False):
                for producer in need.ops:
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
    """When the message of each op that sends one departs and arrives, given when the ops run; at once within a rank."""
    queues: dict[object, list[tuple[float, bool, int, int, Op]]] = defaultdict(list)
    placement = program.placement
    found: dict[Op, tuple[float, float]] = {}
    for rank, order in enumerate(program.orders):
        for index, op in enumerate(order):
            neighbour = neighbour_waiting(op, program.stages)
            if neighbour is not None and program.placement[neighbour] == program.placement[op.stage]:
                found[op] = times[op][1], times[op][1]
            elif neighbour is not None:
                ends = placement[op.stage], placement[neighbour]
                goes_second = cost.half_duplex and neighbour < op.stage
                queues[frozenset(ends) if cost.half_duplex else ends].append((times[op][1], goes_second, rank, index, op))
    for queue in queues.values():
        free = 0.0
        for posted, *_, op in sorted(queue, key=lambda entry: entry[:4]):
            backward = op.kind is not Kind.F
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
    empty = Program.of_pipeline("random", tuple(placement), microbatches, tuple(() for _ in orders))
    done: set[Op] = set()
    while waiting:
        ready = [op for op in waiting if all(_met(need, done) for need in needs(op, empty, lowered=False))]
        op = chance.choice(ready)
        waiting.remove(op)
        done.add(op)
        orders[placement[op.stage]].append(op)
    return replace(empty, orders=tuple(map(tuple, orders)))


def _met(need: Need, done: set[Op]) -> bool:
    return any(op in done for op in need.ops)


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
    return Program.of_pipeline("greedy", tuple(range(stages)), microbatches, tuple(map(tuple, orders)))


def _choose(there: dict[Op, float], free: float, order: list[Op], stage: int, quota: int) -> tuple[float, Op] | None:
    warming_up = len(order) < quota
    mine = [(max(free, since), op) for op, since in there.items() if op.stage == stage]
    mine = [(start, op) for start, op in mine if not warming_up or op.kind is Kind.F]
    rank = {Kind.I: 0, Kind.F: 1, Kind.W: 2}
    return min(mine, key=lambda choice: (choice[0], rank[choice[1].kind], choice[1].microbatch), default=None)


_At = tuple[int, Op]  # a step, and an op of it
_Times = dict[_At, tuple[float, float]]


def simulate_steps(program: Program, case: Case, steps: int) -> _Times:
    """Start and end of every op in every step of a program of several replicas, as the fixed point of the definition.

    Needs REDUCE and STEP in the program and, where messages share links and ports, ops that take time.
    """
    previous: _Times = {(step, op): (0.0, 0.0) for step in range(steps) for order in program.orders for op in order}
    for _ in range(4 * len(previous) + 10):
        times = _one_round_of_steps(program, case, steps, previous)
        if times == previous:
            return times
        previous = times
    raise AssertionError("no fixed point")


def _one_round_of_steps(program: Program, case: Case, steps: int, previous: _Times) -> _Times:
    arrived = _arrivals(program, case, previous)
    routing = program.routing
    before = {op: (order[index - 1] if index else None) for order in program.orders for index, op in enumerate(order)}
    times: _Times = {}
    for worker, order in enumerate(program.orders):
        now = 0.0
        for step in range(steps):
            for op in order:
                start = now
                for need in needs(op, program, lowered=False, hands_over=case.hands_over, changing=case.changing):
                    for producer in need.ops:
                        if (step, producer) in previous:
                            start = max(start, _there(program, case, worker, (step, producer), op, previous, arrived))
                if op.kind is Kind.REDUCE:
                    reduces = [Op(op.stage, Kind.REDUCE, 0, None, routing.replica_of(one)) for one in routing.column(op.stage)]
                    came = [previous[step, last][1] for one in reduces if (last := before[one]) is not None]
                    ended = [previous[step - 1, program.orders[one][-1]][1] for one in routing.column(op.stage) if step]
                    start = max(start, *came, *(ended if len(came) < len(reduces) else ())) + case.reduce[op.stage]
                if op.kind is Kind.STEP and case.barrier:
                    start = max(start, *(end for at, (_, end) in previous.items() if _reduces_in(step, at)))
                factor = case.slow.get(worker, 1.0)
                now = start + _duration(case, op) * factor
                times[step, op] = (start, now)
    return times


def _reduces_in(step: int, at: _At) -> bool:
    return at[0] == step and at[1].kind is Kind.REDUCE


def _duration(case: Case, op: Op) -> float:
    backward = case.cost.input_grad[op.stage], case.cost.weight_grad[op.stage]
    of = {Kind.F: case.cost.forward[op.stage], Kind.I: backward[0], Kind.W: backward[1], Kind.B: sum(backward)}
    return {**of, Kind.STEP: case.step[op.stage], Kind.REDUCE: 0.0}[op.kind]


def _there(
    program: Program, case: Case, worker: int, producer: _At, op: Op, previous: _Times, arrived: dict[_At, float]
) -> float:
    """When what ``op`` needs of its producer is on its worker."""
    _, made = producer
    ended = previous[producer][1]
    if program.holder(made.replica, made.stage, made.microbatch) == worker:
        return ended
    return ended + case.hand_over if made.microbatch != op.microbatch else arrived[producer]


def _arrivals(program: Program, case: Case, previous: _Times) -> dict[_At, float]:
    """When the activation or the gradient of every F, I and B arrives; messages take their links and ports in order of time."""
    place = {op: (worker, index) for worker, order in enumerate(program.orders) for index, op in enumerate(order)}
    free: defaultdict[tuple[str, int, int], float] = defaultdict(float)
    arrived: dict[_At, float] = {}
    for (step, op), (_, posted) in sorted(previous.items(), key=lambda item: (item[1][1], place[item[0][1]])):
        neighbour = neighbour_waiting(op, program.stages) if op.kind.is_compute else None
        if neighbour is None:
            continue
        source, to = place[op][0], program.holder(op.replica, neighbour, op.microbatch)
        if source == to:
            continue
        edge = min(op.stage, neighbour)
        usual = WorkerLink(case.cost.latency_forward[edge], case.cost.occupancy_forward[edge])
        if neighbour < op.stage:
            usual = WorkerLink(case.cost.latency_backward[edge], case.cost.occupancy_backward[edge])
        link = case.links.get((source, to), usual)
        occupied = {
            ("sends", source, 0): case.ports.get(source, 0.0),
            ("link", source, to): link.occupancy,
            ("takes", to, 0): case.ports.get(to, 0.0),
        }
        occupied = {one: seconds for one, seconds in occupied.items() if seconds > 0 or one[0] == "link"}
        departed = max([posted, *(free[one] for one in occupied)])
        for one, seconds in occupied.items():
            free[one] = departed + seconds
        arrived[step, op] = max(departed + seconds for seconds in occupied.values()) + link.latency
    return arrived
