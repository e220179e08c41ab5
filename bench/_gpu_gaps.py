"""Gaps of compute streams behind sends, from the times of ops and messages of one step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

OpTimes = tuple[int, int, str, int, float, float]
"""Rank, stage, kind (F, I, W or B), microbatch, start, end."""

Arrival = tuple[str, int, int, float]
"""Kind of the op that takes the message (F or I), its stage, microbatch, time."""


def longest_gap(ops: Iterable[OpTimes], arrivals: Iterable[Arrival]) -> float:
    """Return the most seconds for which an op did not start while a message of its rank was under way.

    Its inputs were there, and the op before it had ended. A message is under way from the end of the op that made it until it
    has arrived.
    """
    arrived = {(kind, stage, microbatch): time for kind, stage, microbatch, time in arrivals}
    by_rank: dict[int, list[OpTimes]] = {}
    ends: dict[tuple[str, int, int], tuple[int, float]] = {}
    for op in sorted(ops, key=lambda op: op[4]):
        by_rank.setdefault(op[0], []).append(op)
        ends[_input(op[2]), op[1], op[3]] = op[0], op[5]
    longest = 0.0
    for (kind, stage, microbatch), time in arrived.items():
        rank, sent = ends[kind, stage - 1 if kind == "F" else stage + 1, microbatch]
        for before, op in pairwise(by_rank[rank]):
            ready = max(before[5], sent, arrived.get((_input(op[2]), op[1], op[3]), 0.0))
            longest = max(longest, min(op[4], time) - ready)
    return longest


def of_timeline(timeline: Any) -> tuple[list[OpTimes], list[Arrival]]:
    """Return the times of a measured timeline of adaptra's."""
    ops = [(each.rank, each.op.stage, each.op.kind.value, each.op.microbatch, each.start, each.end) for each in timeline]
    arrivals = [
        ("F" if each.kind.value == "SEND_F" else "I", each.destination, each.microbatch, each.arrived)
        for each in timeline.messages
    ]
    return ops, arrivals


def _input(kind: str) -> str:
    """Name the op by its message: a B takes and makes what an I does."""
    return "I" if kind == "B" else kind
