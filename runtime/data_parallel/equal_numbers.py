"""Whole numbers that must be equal on all replicas, compared by means over the replicas.

Each number travels as its bits. The mean of a bit is 0 or 1 only if all replicas have the same one. So every replica notices a
difference, also one whose own number is the mean of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

BITS: Final = 32
"""The number of bits in which a number travels. Sums of bits are exact in float32 for 16 million replicas."""


def bits_of(numbers: Sequence[int]) -> list[float]:
    """Return the bits of numbers below 2**32, the lowest one of each first."""
    return [float(number >> bit & 1) for number in numbers for bit in range(BITS)]


def are_equal(means: Sequence[float]) -> bool:
    """Return whether all replicas have the same numbers, given the mean of each bit over the replicas."""
    return all(one in (0.0, 1.0) for one in means)


def mean_number(means: Sequence[float]) -> float:
    """Return the mean of one number, given the means of its bits."""
    return sum(one * 2**bit for bit, one in enumerate(means))
