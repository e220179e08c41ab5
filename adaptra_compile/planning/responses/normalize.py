"""Normalisation: how many lost workers each stage should bear, and which workers change stages for it.

With k of P workers lost, the busiest worker of a stage computes M + ⌈k·M / (P - k)⌉ of its microbatches. Two losses in one
stage cost more than one in each of two stages. So a worker may leave its stage for one that has lost more. Plans are stored
by the number of losses then, as in ReCycle (SOSP 2024), and not by the set of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from adaptra.errors import PlanError
from adaptra.simulation.case import Case


@dataclass(frozen=True, slots=True)
class RoleMove:
    """A worker that leaves its stage and takes the place of a lost one.

    Attributes:
        worker: The worker that moves.
        place: The lost worker whose stage and replica it takes.
    """

    worker: int
    place: int


def stage_load(case: Case, stage: int, lost: int) -> float:
    """Return the microbatches of a stage's busiest worker with ``lost`` workers fewer, in microbatches at full speed.

    Slow workers stay in their stage and take as many as they compute in the same time.
    """
    slow = _slow(case, stage)
    everything = case.replicas * case.microbatches
    full = case.replicas - lost - len(slow)
    if not slow:
        return float(-(-everything // full))
    factors = [*slow, *([1.0] if full else [])]
    many = [1] * len(slow) + ([full] if full else [])

    def enough(time: float) -> bool:
        return sum(number * int(time / factor + 1e-9) for factor, number in zip(factors, many, strict=True)) >= everything

    return min(factor * _least(lambda count, factor=factor: enough(count * factor), everything) for factor in set(factors))


def stage_work(case: Case, stage: int, lost: int) -> float:
    """Return how long a stage's busiest worker is busy in a step with ``lost`` workers fewer, in the case's unit."""
    ops = case.cost.forward[stage] + case.cost.input_grad[stage] + case.cost.weight_grad[stage]
    return stage_load(case, stage, lost) * ops + case.step[stage] + case.reduce[stage]


def losses(case: Case) -> tuple[int, ...]:
    """Return the number of lost workers per stage."""
    lost_per_stage = [0] * case.stages
    for worker in case.lost:
        lost_per_stage[worker % case.stages] += 1
    return tuple(lost_per_stage)


def normalized(case: Case, number: int) -> tuple[int, ...]:
    """Return the losses per stage with which the busiest worker of all stages has the least to do.

    Each loss goes to the stage that then has the least to do. Of equal ones it is that with fewer losses, then the later one.
    No other choice has a smaller maximum, since a stage's work never falls with its losses. Takes O(S + number · log S).

    Args:
        case: The case. Which workers it has lost does not matter here.
        number: The number of lost workers.

    Raises:
        PlanError: So many losses leave a stage without a worker.
    """
    return _borne(replace(case, lost=frozenset()), [0] * case.stages, number)


def role_moves(case: Case) -> tuple[RoleMove, ...]:
    """Return the fewest role moves after which the busiest worker has the least to do; none if no move helps.

    Workers of replicas with lost ones move first, so that whole replicas stay whole. Slow workers do not move.
    """
    before = losses(case)
    limit = max(stage_work(case, *one) for one in enumerate(_borne(case, [0] * case.stages, sum(before)))) * (1 + 1e-12)
    kept = list(before)
    for stage in range(case.stages):
        while kept[stage] and stage_work(case, stage, kept[stage]) > limit:
            kept[stage] -= 1
    after = _borne(case, kept, sum(before) - sum(kept))
    lost = set(case.lost)
    broken = {worker // case.stages for worker in lost}
    holes = [worker for worker in sorted(lost) if after[worker % case.stages] < before[worker % case.stages]]
    wanted = {stage: before[stage] - after[stage] for stage in range(case.stages)}
    moves: list[RoleMove] = []
    for stage in range(case.stages):
        for _ in range(after[stage] - before[stage]):
            open_holes = [hole for hole in holes if wanted[hole % case.stages] > 0]
            replicas = {hole // case.stages for hole in open_holes}
            donors = [
                (replica not in replicas, replica not in broken, _has_own_links(case, worker), worker)
                for replica in range(case.replicas)
                if (worker := case.worker(replica, stage)) not in lost and case.slow.get(worker, 1.0) == 1.0
            ]
            worker = min(donors)[-1]
            place = min(open_holes, key=lambda hole: (hole // case.stages != worker // case.stages, hole))
            moves.append(RoleMove(worker, place))
            wanted[place % case.stages] -= 1
            holes.remove(place)
            lost = (lost - {place}) | {worker}
    return tuple(moves)


def with_moves(case: Case, moves: Sequence[RoleMove]) -> Case:
    """Return the case after role moves, in which a place that a worker has left counts as lost.

    A worker takes its port with it. Its links are then those of the edge.
    """
    ports = dict(case.ports)
    moved = {end for move in moves for end in (move.worker, move.place)}
    for move in moves:
        ports.pop(move.place, None)
        if move.worker in ports:
            ports[move.place] = ports.pop(move.worker)
    return replace(
        case,
        lost=(case.lost - {move.place for move in moves}) | {move.worker for move in moves},
        ports=ports,
        links={ends: link for ends, link in case.links.items() if not moved.intersection(ends)},
        slow={worker: factor for worker, factor in case.slow.items() if worker not in moved},
    )


def _borne(case: Case, start: Sequence[int], number: int) -> tuple[int, ...]:
    """Return the losses per stage after ``number`` more of them."""
    lost_per_stage = list(start)
    most = [case.replicas - max(1, len(_slow(case, stage))) for stage in range(case.stages)]

    def entry(stage: int) -> tuple[float, int, int]:
        return stage_work(case, stage, lost_per_stage[stage] + 1), lost_per_stage[stage], -stage

    queue = [entry(stage) for stage in range(case.stages) if lost_per_stage[stage] < most[stage]]
    heapq.heapify(queue)
    for _ in range(number):
        if not queue:
            room = sum(most)
            raise PlanError(f"{number} lost workers: expected at most {room}, so that a worker lives on each stage")
        stage = -queue[0][-1]
        lost_per_stage[stage] += 1
        if lost_per_stage[stage] < most[stage]:
            heapq.heapreplace(queue, entry(stage))
        else:
            heapq.heappop(queue)
    return tuple(lost_per_stage)


def _slow(case: Case, stage: int) -> list[float]:
    """Return the factors of a stage's live workers that do not run at full speed."""
    return [
        factor
        for worker, factor in case.slow.items()
        if worker % case.stages == stage and worker not in case.lost and factor != 1.0
    ]


def _has_own_links(case: Case, worker: int) -> bool:
    return worker in case.ports or any(worker in ends for ends in case.links)


def _least(holds: Callable[[int], bool], most: int) -> int:
    """Return the least number from 1 to ``most`` for which a condition holds that then goes on to hold."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
