"""Re-cutting: fewer layers for the stage with fewer workers, in all replicas alike.

Workers of a stage stay alike, so routes and sums of gradients stay as they are. Of a whole model cut into equal pieces, each
stage takes as many neighbouring ones as its busiest worker can compute in the same time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

from adaptra.planning.responses.normalize import losses, stage_load
from adaptra.simulation.case import Case

_HALVINGS: Final = 60
_SLACKS: Final = (0.0, 0.01, 0.02, 0.04, 0.06, 0.08)
"""How much longer than the least the busiest worker may be busy, as a fraction."""


@dataclass(frozen=True)
class Recut:
    """A job whose replicas are all cut elsewhere.

    Attributes:
        case: The case after the move of the cuts.
        begins: Per stage its first piece, and at the end the number of all pieces.
        received: Per stage, what it receives from others, as a fraction of what a stage had.
        held: Per stage, the pieces that it holds then, as a fraction of what a stage had.
    """

    case: Case
    begins: tuple[int, ...]
    received: tuple[float, ...]
    held: tuple[float, ...]


def recuts(case: Case, pieces: int) -> Iterator[Recut]:
    """Yield ways to cut all replicas, first that with which the busiest worker has the least to do and the least moves.

    The others trade some work of the busiest for a shorter fill, so that a plan may show which is best. The times are
    estimates, as in :meth:`adaptra.simulation.cut_points.CutPoints.moves`: a piece takes as long on any stage as on its own.
    STEP, REDUCE and memory are in proportion to pieces. Messages stay as they are.

    Args:
        case: The case, with its lost and slow workers.
        pieces: The number of equal pieces into which each stage of today can be cut, at least 1.
    """
    stages, cost = case.stages, case.cost
    lost = losses(case)
    loads = [stage_load(case, stage, lost[stage]) for stage in range(stages)]
    times = zip(cost.forward, cost.input_grad, cost.weight_grad, strict=True)
    ops = _sums([sum(of_stage) for of_stage in times], pieces)
    updates = _sums([step + reduce for step, reduce in zip(case.step, case.reduce, strict=True)], pieces)
    work = [[load * a + b for a, b in zip(ops, updates, strict=True)] for load in loads]
    now = [stage * pieces for stage in range(stages + 1)]
    longest = max(sums[end] - sums[begin] for sums, (begin, end) in zip(work, pairwise(now), strict=True))
    low, high = 0.0, longest * (1 + 1e-12)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _latest(work, middle) else (middle, high)
    seen: set[tuple[int, ...]] = set()
    for slack in _SLACKS:
        most = high * (1 + slack) * (1 + 1e-9)
        earliest, latest = _earliest(work, most), _latest(work, most)
        between = [(early + late) // 2 for early, late in zip(earliest, latest, strict=True)]
        for wanted in (now, latest, between):
            begins = _nearest(work, most, earliest, wanted)
            if begins not in seen:
                seen.add(begins)
                yield _recut(case, begins, pieces)


def _recut(case: Case, begins: tuple[int, ...], pieces: int) -> Recut:
    held = [(end - begin) / pieces for begin, end in pairwise(begins)]
    kept = [_common(stage * pieces, *ends, pieces) for stage, ends in enumerate(pairwise(begins))]
    received = tuple(holds - keeps for holds, keeps in zip(held, kept, strict=True))
    return Recut(_cut(case, begins, pieces), begins, received, tuple(held))


def _sums(times: Sequence[float], pieces: int) -> list[float]:
    """Return the time of all pieces before each piece, given that of each stage."""
    return [0.0, *accumulate(time / pieces for time in times for _ in range(pieces))]


def _latest(work: Sequence[Sequence[float]], most: float) -> list[int]:
    """Return per stage the latest end with which no stage up to it is busy for longer than ``most``; empty if none fits."""
    ends, begin, number = [0], 0, len(work[0]) - 1
    for stage, sums in enumerate(work):
        end = min(bisect_right(sums, sums[begin] + most) - 1, number - (len(work) - 1 - stage))
        if end <= begin:
            return []
        ends.append(end)
        begin = end
    return ends if ends[-1] == number else []


def _earliest(work: Sequence[Sequence[float]], most: float) -> list[int]:
    """Return per stage the earliest end behind which the later stages are not busy for longer than ``most``."""
    number = len(work[0]) - 1
    mirrored = [[sums[-1] - sums[number - piece] for piece in range(number + 1)] for sums in reversed(work)]
    return [number - end for end in reversed(_latest(mirrored, most))]


def _nearest(work: Sequence[Sequence[float]], most: float, earliest: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the cuts nearest to the wanted ones with which no stage is busy for longer than ``most``."""
    number = len(work[0]) - 1
    ends = [0]
    for stage, sums in enumerate(work):
        begin = ends[-1]
        latest = min(bisect_right(sums, sums[begin] + most) - 1, number - (len(work) - 1 - stage))
        ends.append(min(max(wanted[stage + 1], earliest[stage + 1], begin + 1), latest))
    return tuple(ends)


def _cut(case: Case, begins: Sequence[int], pieces: int) -> Case:
    """Return the case with the stages' times, and their room for microbatches, in proportion to the pieces."""

    def moved(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(
            sum(times[stage] * _common(stage * pieces, begin, end, pieces) for stage in range(case.stages))
            for begin, end in pairwise(begins)
        )

    memory = case.memory
    if memory is not None:
        taken = moved([1 / most for most in memory])
        memory = tuple(max(1, math.floor(1 / share + 1e-9)) for share in taken)
    cost = replace(
        case.cost,
        forward=moved(case.cost.forward),
        input_grad=moved(case.cost.input_grad),
        weight_grad=moved(case.cost.weight_grad),
    )
    return replace(case, cost=cost, step=moved(case.step), reduce=moved(case.reduce), memory=memory)


def _common(first: int, begin: int, end: int, pieces: int) -> float:
    """Return the part of a stage of today, from piece ``first`` on, that lies between two cuts."""
    return max(0, min(end, first + pieces) - max(begin, first)) / pieces
