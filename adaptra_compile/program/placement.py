"""Which rank holds which stages: one stage each, several in turn, or there and back."""

from __future__ import annotations

from collections.abc import Sequence

Edge = tuple[int, int]
"""A directed edge of stages: (the sending one, the receiving one)."""


def in_turn(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stages on ranks 0, 1, … R-1, 0, 1, …: one stage each with one chunk, else as interleaved 1F1B places them."""
    return tuple(range(ranks)) * chunks


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Two stages on each rank, there and back, as ZB-V places them: the first rank also holds the last stage."""
    return (*range(ranks), *reversed(range(ranks)))


def is_straight(placement: Sequence[int]) -> bool:
    """Whether stage s lies on rank s."""
    return tuple(placement) == in_turn(len(placement))


def stages_of(rank: int, placement: Sequence[int]) -> tuple[int, ...]:
    """The stages that lie on a rank, where ``placement[stage]`` is a stage's rank."""
    return tuple(stage for stage, holder in enumerate(placement) if holder == rank)
