"""Balance: choose where to cut so that the slowest stage is as fast as it can be, and then so that little is sent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import fx

from adaptra.errors import PartitionError

TOLERANCE: Final = 0.1
"""By how much the slowest stage may exceed the least possible so that less has to be sent. Estimates are not better than
that."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where a flat graph may be cut, and what each cut costs.

    Attributes:
        crossing: Per position 0 … number of nodes, the values that cross it, or None where a cut is not possible.
        bytes: Per position, the bytes of these values.
        work: Per position, the estimated cost of all nodes before it.
    """

    crossing: tuple[tuple[fx.Node, ...] | None, ...]
    bytes: tuple[int, ...]
    work: tuple[float, ...]


def balance(cuts: Cuts, stages: int) -> tuple[int, ...]:
    """Choose stages - 1 cuts.

    The slowest stage is at most ``TOLERANCE`` slower than in any other choice of cuts, and within that the bytes over all cuts
    are the fewest possible.

    Raises:
        PartitionError: There are fewer places to cut.
    """
    candidates = _candidates(cuts)
    units = len(candidates) - 1
    if stages > units:
        raise PartitionError(
            f"stages={stages}: the model has only {units} operations that can be told apart as stages: use "
            f"stages={units} or fewer"
        )
    work = [cuts.work[position] for position in candidates]
    limit = _least_bottleneck(work, stages) * (1 + TOLERANCE)
    return tuple(candidates[one] for one in _fewest_bytes(work, [cuts.bytes[p] for p in candidates], stages, limit))


def _candidates(cuts: Cuts) -> list[int]:
    """Positions 0 and the end, and between them the possible cut with the fewest bytes for every amount of work before it."""
    total = cuts.work[-1]
    best: dict[float, int] = {}
    for position, nodes in enumerate(cuts.crossing):
        work = cuts.work[position]
        if nodes is not None and 0 < work < total and (work not in best or cuts.bytes[position] < cuts.bytes[best[work]]):
            best[work] = position
    return [0, *best.values(), len(cuts.crossing) - 1]


def _least_bottleneck(work: Sequence[float], stages: int) -> float:
    low, high = work[-1] / stages, work[-1]
    # Each halving is exact to the last bit that matters; the tolerance is far above what is left.
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(work, stages, middle) else (middle, high)
    return high


def _fits(work: Sequence[float], stages: int, limit: float) -> bool:
    at = 0
    for _ in range(stages):
        further = bisect_right(work, work[at] + limit) - 1
        if further == len(work) - 1:
            return True
        if further == at:
            return False
        at = further
    return False


def _fewest_bytes(work: Sequence[float], sizes: Sequence[int], stages: int, limit: float) -> list[int]:
    """Dynamic programming over (stages so far, candidate): the least bytes, then the best balance."""
    count = len(work)
    best: list[tuple[float, int] | None] = [None] * count
    best[0] = (0.0, -1)
    table: list[list[tuple[float, int] | None]] = []
    for stage in range(stages):
        table.append(best)
        following: list[tuple[float, int] | None] = [None] * count
        for begin, reached in enumerate(best):
            if reached is None:
                continue
            for end in range(begin + 1, bisect_right(work, work[begin] + limit)):
                if (end == count - 1) != (stage == stages - 1):
                    continue
                share = (work[end] - work[begin]) / limit
                # Shares are below 1 each and break ties only: bytes come in whole tensors.
                value = reached[0] + (sizes[end] if end < count - 1 else 0) + share * share / stages
                known = following[end]
                if known is None or value < known[0]:
                    following[end] = (value, begin)
        best = following
    chosen: list[int] = []
    at = count - 1
    for entries in [best, *reversed(table[1:])]:
        entry = entries[at]
        assert entry is not None, "the least bottleneck is attainable"
        at = entry[1]
        chosen.append(at)
    return list(reversed(chosen))[1:]
