"""Random jobs of several replicas: cases, routings, and programs that run, for tests to compare with."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import needs
from adaptra.program.placement import in_turn, v_shaped
from adaptra.program.routing import Route, Routing
from adaptra.simulation.case import Case, WorkerLink
from adaptra.simulation.cost import CostModel


def even_case(replicas: int, stages: int, microbatches: int, optimizer: float = 0.0) -> Case:
    """A healthy case in which F, I and W take 1, without memory limit."""
    pipeline = Case(CostModel.uniform(stages, 1, 1, 1), microbatches, tuple(range(stages)))
    return pipeline.of_replicas(replicas, optimizer)


def random_case(seed: int, *, links: bool = False, shapes: bool = False) -> Case:
    """A small case with unequal stages, and by chance lost and slow workers and unequal links.

    With ``shapes`` its workers may also have several stages, anywhere, and update behind a barrier.
    """
    chance = random.Random(seed)
    replicas, stages, microbatches = chance.randint(1, 4), chance.randint(1, 5), chance.randint(1, 6)
    placement = random_placement(stages, seed) if shapes else tuple(range(stages))
    ranks = max(placement) + 1

    def times(most: int) -> tuple[float, ...]:
        return tuple(float(chance.randint(0, most)) / 4 for _ in range(stages))

    workers = range(replicas * ranks)
    lost = {chance.choice([*workers]) for _ in range(chance.randint(0, 2))}
    columns = [[replica * ranks + rank for replica in range(replicas)] for rank in range(ranks)]
    lost -= {column[0] for column in columns if set(column) <= lost}
    pairs = [(a, b) for a in workers for b in workers if a != b]
    cost = CostModel(
        forward=times(12),
        input_grad=times(12),
        weight_grad=times(12),
        latency_forward=(chance.choice([0.0, 0.5, 2.0]),) * (stages - 1),
        latency_backward=(chance.choice([0.0, 0.5, 2.0]),) * (stages - 1),
        occupancy_forward=(0.0,) * (stages - 1),
        occupancy_backward=(0.0,) * (stages - 1),
    )
    case = Case(
        cost,
        microbatches,
        placement,
        replicas=replicas,
        step=times(8),
        reduce=times(4),
        slow={chance.choice([*workers]): chance.choice([1.5, 2.0, 3.7])} if chance.random() < 0.5 else {},
        lost=frozenset(lost),
        hand_over=chance.choice([0.0, 0.75]),
        hands_over=chance.random() < 0.7,
        barrier=shapes and seed % 2 == 0,
        changing=frozenset(stage for stage in range(stages) if chance.random() < 0.2),
        name=f"random {seed}",
    )
    if not links or not pairs:
        return case
    return replace(
        case,
        cost=replace(cost, occupancy_forward=(chance.choice([0.0, 0.25]),) * (case.stages - 1)),
        links={chance.choice(pairs): WorkerLink(chance.random() * 3, chance.random() * 3) for _ in range(chance.randint(0, 4))},
        ports={chance.choice([*workers]): chance.random() * 2 for _ in range(chance.randint(0, 2))},
    )


def random_placement(stages: int, seed: int) -> tuple[int, ...]:
    """A placement of stages on at most as many ranks: straight, interleaved, a V or any other."""
    chance = random.Random(seed)
    ranks = chance.randint(1, stages)
    rest = [chance.randrange(ranks) for _ in range(stages - ranks)]
    any_other = (*range(ranks), *rest)
    return chance.choice([any_other, (in_turn(ranks) * stages)[:stages], (v_shaped(ranks) * stages)[:stages]])


def random_routing(case: Case, seed: int) -> Routing:
    """A routing of a case in which every microbatch of every replica may pass each stage on any live worker."""
    chance = random.Random(seed)
    grid = case.grid
    routes: list[Route] = []
    for replica in range(case.replicas):
        start = 0
        while start < case.microbatches:
            stop = chance.randint(start + 1, case.microbatches)
            path: list[int] = []
            for stage in range(case.stages):
                live = [worker for row in grid if (worker := row[stage]) is not None]
                home = grid[replica][stage]
                path.append(home if home is not None and chance.random() < 0.7 else chance.choice(live))
            routes.append(Route(replica, range(start, stop), tuple(path)))
            start = stop
    return Routing(grid, tuple(routes), case.microbatches)


def random_job_program(case: Case, seed: int) -> Program:
    """A program of a case, without deadlock, whose workers run any op that is ready and keeps microbatch order."""
    chance = random.Random(seed)
    routing = random_routing(case, seed)
    orders: list[list[Op]] = [[] for _ in range(routing.live[-1] + 1)]
    empty = Program("random", routing, tuple(() for _ in orders))
    queues: list[list[Op]] = []
    for replica in range(case.replicas):
        for stage in range(case.stages):
            by_worker: dict[int, list[list[Op]]] = {}
            for microbatch in range(case.microbatches):
                holder = routing.holder(replica, stage, microbatch)
                fused = chance.random() < 0.2
                for queue, kind in enumerate((Kind.F, Kind.B if fused else Kind.I, *(() if fused else (Kind.W,)))):
                    by_worker.setdefault(holder, [[], [], []])[queue].append(Op(stage, kind, microbatch, None, replica))
            queues += [queue for three in by_worker.values() for queue in three if queue]
    done: set[Op] = set()

    def is_ready(op: Op) -> bool:
        wanted = needs(op, empty, lowered=False, hands_over=case.hands_over, changing=case.changing)
        waits = all(any(one in done for one in need.ops) for need in wanted)
        earlier = [Op(op.stage, Kind.W, before, None, op.replica) for before in range(op.microbatch)]
        here = [one for one in earlier if routing.holder(op.replica or 0, op.stage, one.microbatch) == holder_of(op)]
        in_order = op.kind is not Kind.B or all(one in done or replace(one, kind=Kind.B) in done for one in here)
        return waits and in_order

    def holder_of(op: Op) -> int:
        return routing.holder(op.replica or 0, op.stage, op.microbatch)

    while queues:
        queue = chance.choice([queue for queue in queues if is_ready(queue[0])])
        op = queue.pop(0)
        queues = [queue for queue in queues if queue]
        done.add(op)
        orders[holder_of(op)].append(op)
    return replace(empty, orders=tuple(map(tuple, orders)))


def damaged(program: Program, seed: int, kinds: Collection[Kind]) -> Program:
    """The program with one or two of its ops of these kinds moved, swapped, dropped, doubled or put on another rank."""
    chance = random.Random(f"damage {seed}")
    orders = [list(order) for order in program.orders]
    for _ in range(chance.randint(1, 2)):
        places = [(rank, at) for rank, order in enumerate(orders) for at, op in enumerate(order) if op.kind in kinds]
        if not places:
            break
        rank, at = chance.choice(places)
        order, other = orders[rank], chance.choice([number for where, number in places if where == rank])
        match chance.choice(["next", "swapped", "dropped", "doubled", "moved", "elsewhere", "turned"]):
            case "next":
                order.insert(max(0, at - 1), order.pop(at))
            case "swapped":
                order[at], order[other] = order[other], order[at]
            case "dropped":
                order.pop(at)
            case "doubled":
                order.insert(other, order[at])
            case "moved":
                order.insert(chance.randrange(len(order)), order.pop(at))
            case "elsewhere":
                orders[chance.choice(places)[0]].append(order.pop(at))
            case _:
                order[at] = replace(order[at], kind=chance.choice(sorted(kinds, key=lambda kind: kind.value)))
    return replace(program, orders=tuple(map(tuple, orders)))
