"""What each worker did in a step, from a timeline: its compute, whose microbatches it computed, and for whom it waited."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, NamedTuple

from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import USED_BY, other_end
from adaptra.simulation.timeline import MessageInterval, OpInterval, Timeline

SLOW_PACE: Final = 1.2
"""The pace from which on reports mark a worker as slow."""

Counts = tuple[tuple[int, int], ...]
"""Numbers of microbatches by replica or by worker, in ascending order of these."""

Waits = tuple[tuple[int, float], ...]
"""Waiting times by the worker whose messages were waited for, the longest first."""


class Moved(NamedTuple):
    """The microbatches that changed hands within a step, as :attr:`WorkerStep.taken` and :attr:`WorkerStep.given`."""

    taken: Counts
    given: Counts


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """One worker in one step. Times are in the timeline's unit.

    Attributes:
        worker: Its number in the job.
        replica: Its own replica, 0 in a program of one pipeline.
        stages: Its stages.
        compute: The time for which it computed.
        per_microbatch: The usual time of F, I and W of one microbatch on all its stages; None if it computed none.
        own: The number of microbatches of its own replica that it computed.
        taken: By replica, the number of other replicas' microbatches that it computed.
        given: By worker, the number of its own replica's microbatches that others computed in its place.
        waits: By worker, the time for which its ops waited for messages from there; the longest first.
        reduce: The time of its REDUCE, None where not measured.
        exposed: The exposed part of that, None where not known.
    """

    worker: int
    replica: int
    stages: tuple[int, ...]
    compute: float
    per_microbatch: float | None
    own: int
    taken: Counts
    given: Counts
    waits: Waits
    reduce: float | None = None
    exposed: float | None = None

    @property
    def name(self) -> str:
        """The worker as ``REPLICA.STAGE``."""
        return worker_name(self.replica, self.stages)


def worker_name(replica: int, stages: Iterable[int]) -> str:
    """Return a worker as ``REPLICA.STAGE``, such as ``1.2``, or ``1.0+3`` if it has several stages."""
    return f"{replica}.{'+'.join(map(str, stages))}"


def place_of(program: Program, rank: int) -> tuple[int, tuple[int, ...]]:
    """Return the replica and the stages of a program's rank. In a program of one pipeline the replica is 0."""
    return program.routing.replica_of(rank), program.routing.stages_of(rank)


def is_foreign(program: Program, interval: OpInterval) -> bool:
    """Return whether an op computes a microbatch of another replica than its worker's."""
    return interval.op.replica != program.routing.replica_of(interval.rank)


def worker_steps(timeline: Timeline) -> tuple[WorkerStep, ...]:
    """Return an entry for each rank of a timeline: for each worker of several replicas. Lost workers have none."""
    incoming: defaultdict[int, list[MessageInterval]] = defaultdict(list)
    for message in timeline.messages:
        incoming[timeline.ends_of(message)[1]].append(message)
    return tuple(_worker_step(timeline, rank, incoming[rank]) for rank in timeline.program.routing.live)


def worker_step(timeline: Timeline, rank: int) -> WorkerStep:
    """Return the entry of one rank."""
    return _worker_step(timeline, rank, [one for one in timeline.messages if timeline.ends_of(one)[1] == rank])


def paces(steps: Iterable[WorkerStep]) -> dict[int, float]:
    """Return how long workers take for a microbatch, as multiples of what is usual for the others of their stages.

    Workers that computed nothing, or have no others to compare with, are left out.
    """
    by_stages: defaultdict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for one in steps:
        if one.per_microbatch is not None:
            by_stages[one.stages][one.worker] = one.per_microbatch
    pace_of: dict[int, float] = {}
    for of_worker in by_stages.values():
        for worker, own in of_worker.items():
            others = [each for other, each in of_worker.items() if other != worker]
            if others and (usual := median(others)) > 0:
                pace_of[worker] = own / usual
    return pace_of


def usual_step(steps: Sequence[WorkerStep]) -> WorkerStep:
    """Return one entry for some steps of one worker: usual times, and the microbatches of the last step."""
    waited: defaultdict[int, float] = defaultdict(float)
    for one in steps:
        for worker, time in one.waits:
            waited[worker] += time / len(steps)

    def usual(times: Iterable[float | None]) -> float | None:
        known = [time for time in times if time is not None]
        return median(known) if known else None

    return replace(
        steps[-1],
        compute=median(one.compute for one in steps),
        per_microbatch=usual(one.per_microbatch for one in steps),
        waits=_longest_first(waited),
        reduce=usual(one.reduce for one in steps),
        exposed=usual(one.exposed for one in steps),
    )


def _worker_step(timeline: Timeline, rank: int, incoming: Iterable[MessageInterval]) -> WorkerStep:
    program, order = timeline.program, timeline.ops[rank]
    replica, stages = place_of(program, rank)
    computed = {(one.op.replica, one.op.microbatch) for one in order}
    taken = Counter(home for home, _ in computed if home != replica)
    given_away: Counter[int] = Counter()
    for microbatch in range(program.microbatches):
        given_away.update({program.holder(replica, stage, microbatch) for stage in stages} - {rank})
    reduce = next((one for one in timeline.reduces if one.rank == rank), None)
    return WorkerStep(
        rank,
        replica,
        stages,
        sum(one.end - one.start for one in order),
        _per_microbatch(order),
        len(computed) - sum(taken.values()),
        tuple(sorted(taken.items())),
        tuple(sorted(given_away.items())),
        _waits(timeline, order, incoming),
        None if reduce is None else reduce.end - reduce.start,
        None if reduce is None else reduce.exposed,
    )


def _per_microbatch(order: Iterable[OpInterval]) -> float | None:
    durations: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for one in order:
        durations[one.op.stage, one.op.kind].append(one.end - one.start)
    return sum(map(median, durations.values())) if durations else None


def _waits(timeline: Timeline, order: Iterable[OpInterval], incoming: Iterable[MessageInterval]) -> Waits:
    """Return the time between ops in which the message of the later one had not arrived, by the worker that sent it."""
    needed: defaultdict[Op, list[MessageInterval]] = defaultdict(list)
    for message in incoming:
        receive = other_end(message.send)
        for kind in USED_BY.get(receive.kind, ()):
            needed[replace(receive, kind=kind)].append(message)
    waits: defaultdict[int, float] = defaultdict(float)
    free = 0.0
    for interval in order:
        last = max(needed[interval.op], key=lambda message: message.arrived, default=None)
        if last is not None and (waited := min(last.arrived, interval.start) - free) > 0:
            waits[timeline.ends_of(last)[0]] += waited
        free = interval.end
    return _longest_first(waits)


def _longest_first(waited: Mapping[int, float]) -> Waits:
    return tuple(sorted(waited.items(), key=lambda each: (-each[1], each[0])))
