"""Buckets: tensors that travel together, and the parts of a bucket, each of which has an owner."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from adaptra.simulation.links import Link

MESSAGE_BYTES: Final = 4 * 2**20
"""Bytes of a message in a full bucket where links are not measured."""

LEAST_BYTES: Final = 256 * 2**10
"""The smallest bucket that is chosen. Smaller ones cost a processor as much time to handle as to copy."""

LEAST_DEVICE_BYTES: Final = 64 * 2**20
"""The smallest bucket of tensors on GPUs that is chosen. Each costs launches and waits for copies, however small it is."""


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


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces of tensors of one kind that travel as one tensor.

    Attributes:
        pieces: The pieces in this order.
        ends: The element behind each part, by its owner; empty if the parts are nearly equal.
    """

    pieces: tuple[TensorRange, ...]
    ends: tuple[int, ...] = ()

    def parts(self, replicas: int) -> list[slice]:
        """Return the elements of each replica's part; a part may be empty."""
        count = sum(one.end - one.begin for one in self.pieces)
        if not self.ends:
            return [part_of(count, replicas, index) for index in range(replicas)]
        return [slice(begin, end) for begin, end in zip((0, *self.ends), self.ends, strict=False)]


def bucket_bytes(replicas: int) -> int:
    """Return the size limit of a bucket, in bytes. Each message carries one of as many parts as there are replicas.

    Terms of the next bucket travel while an owner waits for those of this one. So several buckets cost a link no more than one.
    """
    return replicas * MESSAGE_BYTES


def best_bucket_bytes(nbytes: int, replicas: int, link: Link, least: int = LEAST_BYTES) -> int:
    """Return the bucket size at which sums over replicas are shortest.

    With k buckets of b bytes each, k+1 of them follow each other on a link, forth and back. Each costs P-1 times the latency
    and the time of b/P bytes. That is least at b = √(bytes · P · latency / time of a byte).

    Args:
        nbytes: The bytes of all tensors.
        replicas: Their number P.
        link: The slowest link between two of them.
        least: The smallest bucket that is chosen.
    """
    squared = nbytes * replicas * link.latency / link.per_byte if link.per_byte > 0 else math.inf
    return max(nbytes if squared >= nbytes**2 else math.isqrt(int(squared)), least)


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
            buckets.append(Bucket(tuple(current)))
        current, used = [], 0

    for number, (count, width, shared) in enumerate(tensors):
        if shared != kind or used + count * width > limit:
            close()
        kind = shared
        pieces = _cut(number, count, max(1, limit // width))
        for piece in pieces:
            current.append(piece)
            used += (piece.end - piece.begin) * width
            if len(pieces) > 1:
                close()
    close()
    return buckets


def make_owned_buckets(
    tensors: Sequence[tuple[int, int, Hashable]], owners: Sequence[int], replicas: int, limit: int
) -> list[Bucket]:
    """Distribute tensors to buckets nearly in their order, where each part consists of what one replica owns.

    Args:
        tensors: As of :func:`make_buckets`.
        owners: The replica that owns each tensor.
        replicas: Their number.
        limit: The most bytes of a bucket. No part is above its share of them; one element may exceed it.
    """
    buckets: list[Bucket] = []
    most_bytes = max(1, limit // replicas)
    parts: list[list[TensorRange]] = [[] for _ in range(replicas)]
    used, kind = [0] * replicas, None

    def close() -> None:
        nonlocal parts, used
        if any(parts):
            counts = (sum(one.end - one.begin for one in part) for part in parts)
            buckets.append(Bucket(tuple(one for part in parts for one in part), tuple(accumulate(counts))))
        parts, used = [[] for _ in range(replicas)], [0] * replicas

    for number, ((count, width, shared), owner) in enumerate(zip(tensors, owners, strict=True)):
        if shared != kind:
            close()
        kind = shared
        for piece in _cut(number, count, max(1, most_bytes // width)):
            nbytes = (piece.end - piece.begin) * width
            if used[owner] and used[owner] + nbytes > most_bytes:
                close()
            parts[owner].append(piece)
            used[owner] += nbytes
    close()
    return buckets


def _cut(tensor: int, count: int, most: int) -> list[TensorRange]:
    """Return a tensor of ``count`` elements in pieces of at most ``most``."""
    return [TensorRange(tensor, begin, min(count, begin + most)) for begin in range(0, count, most)]


def part_of(count: int, parts: int, index: int) -> slice:
    """Return the elements of one of ``parts`` nearly equal parts of ``count`` elements; a part may be empty."""
    return slice(count * index // parts, count * (index + 1) // parts)
