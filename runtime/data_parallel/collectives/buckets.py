"""Buckets: tensors that travel together, and the parts of a bucket, each of which has an owner."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

LATENCY: Final = 50e-6
"""Seconds of one message between replicas, where it is not measured. About that of TCP within a data centre."""

RATE: Final = float(2**30)
"""Bytes per second between replicas, where the rate is not measured. About that of a network of 10 Gbit/s."""

LEAST_BYTES: Final = 256 * 1024
"""The smallest limit of a bucket, in bytes. Smaller ones would cost more latency than they save."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """A range of a tensor's elements.

    Attributes:
        tensor: The tensor's number.
        begin, end: The first element and the one after the last.
    """

    tensor: int
    begin: int
    end: int


Bucket = tuple[TensorRange, ...]
"""Pieces of tensors of one kind that travel as one tensor, in this order."""


def bucket_bytes(total: int, replicas: int, latency: float = LATENCY, rate: float = RATE) -> int:
    """Return the size limit of a bucket, in bytes: √(s·N·α·rate), and at least ``LEAST_BYTES``.

    k buckets of s/k bytes take about (k + 1)·(N − 1)·(α + s/(k·N·rate)). This is least for k = √(s/(N·α·rate)).

    Args:
        total: The bytes s of all tensors.
        replicas: The number N of replicas.
        latency: The seconds α of one message.
        rate: Bytes per second.
    """
    return max(LEAST_BYTES, int(math.sqrt(total * replicas * latency * rate)))


def make_buckets(tensors: Sequence[tuple[int, int, Hashable]], limit: int) -> list[Bucket]:
    """Distribute tensors to buckets in their order. A tensor is cut only if it alone is above the limit.

    Args:
        tensors: Of each tensor the number of elements, the bytes of one element, and what all tensors of a bucket share.
        limit: The most bytes of a bucket; one element may exceed it.
    """
    buckets: list[Bucket] = []
    current: list[TensorRange] = []
    used, kind = 0, None

    def close() -> None:
        nonlocal current, used
        if current:
            buckets.append(tuple(current))
        current, used = [], 0

    for number, (count, width, shared) in enumerate(tensors):
        if shared != kind or used + count * width > limit:
            close()
        kind = shared
        most = max(1, limit // width)
        for begin in range(0, count, most):
            end = min(count, begin + most)
            current.append(TensorRange(number, begin, end))
            used += (end - begin) * width
            if count > most:
                close()
    close()
    return buckets


def part_of(count: int, parts: int, index: int) -> slice:
    """Return the elements of one of ``parts`` nearly equal parts of ``count`` elements; a part may be empty."""
    return slice(count * index // parts, count * (index + 1) // parts)
