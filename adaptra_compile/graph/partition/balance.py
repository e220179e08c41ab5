"""Balance: the choice of cut points that makes the slowest stage fast, and then the messages small."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import fx

from adaptra.errors import PartitionError

TOLERANCE: Final = 0.1
"""Tolerated excess of the slowest stage over the least possible, as a fraction of it, to make messages smaller.

The estimates of work are not more accurate than this.
"""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The possible cut points of a flat graph, and the cost of each.

    Attributes:
        crossing: Per position 0 … number of nodes, the values that cross it, or None if a cut is not possible.
        bytes: Per position, the bytes of these values.
        work: Per position, the estimated cost of all nodes before it.
    """

    crossing: tuple[tuple[fx.Node, ...] | None, ...]
    bytes: tuple[int, ...]
    work: tuple[float, ...]


def balance(cuts: Cuts, stages: int) -> tuple[int, ...]:
    """Choose stages - 1 cut points.

    The slowest stage exceeds the least possible by at most ``TOLERANCE``. Among such choices the bytes over all cuts are the
    fewest possible.

    Raises:
        PartitionError: There are fewer possible cut points.
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
    """Return position 0, the end, and for every amount of work before it the possible cut point with the fewest bytes."""
    total = cuts.work[-1]
    best: dict[float, int] = {}
    for position, nodes in enumerate(cuts.crossing):
        work = cuts.work[position]
        if nodes is not None and 0 < work < total and (work not in best or cuts.bytes[position] < cuts.bytes[best[work]]):
            best[work] = position
    return [0, *best.values(), len(cuts.crossing) - 1]


def _least_bottleneck(work: Sequence[float], stages: int) -> float:
    low, high = work[-1] / stages, work[-1]
    # After 50 halvings the remaining error is far below the tolerance.
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
    """Find the fewest bytes, then the best balance, by dynamic programming over (stages so far, candidate)."""
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
                # The sum of squared shares is at most 1 and only breaks ties, since bytes are whole numbers.
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
