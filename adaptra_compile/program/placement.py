"""Placement of stages on ranks: straight, interleaved, or V."""

from __future__ import annotations

from collections.abc import Sequence

Edge = tuple[int, int]
"""A directed edge: (sending stage, receiving stage)."""


def in_turn(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the placement 0, 1, … R-1, 0, 1, …: straight with one chunk, else that of interleaved 1F1B."""
    return tuple(range(ranks)) * chunks


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Return the V placement of ZB-V, with two stages on each rank: the first rank also has the last stage."""
    return (*range(ranks), *reversed(range(ranks)))


def is_straight(placement: Sequence[int]) -> bool:
    """Return whether every stage s is on rank s."""
    return tuple(placement) == in_turn(len(placement))


def has_several(placement: Sequence[int]) -> bool:
    """Return whether a rank has several stages, whatever the ranks' numbers."""
    return len(set(placement)) < len(placement)


def stages_of(rank: int, placement: Sequence[int]) -> tuple[int, ...]:
    """Return the stages on a rank. ``placement[stage]`` is the stage's rank."""
    return tuple(stage for stage, holder in enumerate(placement) if holder == rank)
