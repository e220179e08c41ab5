"""What a sum of tensors of some sizes has in common with the next one: its buckets, messages, and the order of its turns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from adaptra.collectives.buckets import Bucket, TensorRange, make_buckets, make_owned_buckets
from adaptra.collectives.rounds import Algorithm, TermMessage
from adaptra.runtime.data_parallel.collectives.moves import SumTurn

_KEPT: Final = 32
"""How many layouts a process keeps: a model's sums, and those of calls whose tensors differ."""


class SumSettings(NamedTuple):
    """How a rank adds.

    Attributes:
        algorithm: The rounds.
        replicas: The number of ranks.
        rank: This one.
        limit: The most bytes of a bucket.
        in_rounds: Whether a round's messages begin together.
        dtype: The least precise dtype of additions, None for that of the tensors.
        mean: Whether the sum is divided.
        most_sent: The most messages that are under way to one other rank.
    """

    algorithm: Algorithm
    replicas: int
    rank: int
    limit: int
    in_rounds: bool
    dtype: torch.dtype | None
    mean: bool
    most_sent: int


class SumLayout:
    """How tensors of some sizes are added.

    Args:
        buckets: Their buckets.
        settings: How they are added.

    Attributes:
        buckets, settings: As given.
        parts: The number of parts of all buckets; some may be empty.
        messages: Those of this rank, by round. Empty parts have none.
        turns: The turns of the first sum, once it has ended; None where each sum has others.
    """

    def __init__(self, buckets: Sequence[Bucket], settings: SumSettings) -> None:
        self.buckets: Final = buckets
        self.settings: Final = settings
        self.parts: Final = len(buckets) * settings.replicas
        sizes = [where.stop - where.start for bucket in buckets for where in bucket.parts(settings.replicas)]
        self.messages: Final[Sequence[TermMessage]] = [
            one
            for one in settings.algorithm(settings.replicas, self.parts, settings.rank)
            if settings.rank in (one.source, one.destination) and sizes[one.value.part]
        ]
        self.turns: Sequence[SumTurn] | None = None


@lru_cache(_KEPT)
def layout_of(
    sizes: tuple[tuple[int, torch.dtype, torch.device], ...], owners: tuple[int, ...], settings: SumSettings
) -> SumLayout:
    """Return the layout for tensors.

    Args:
        sizes: Of each tensor the number of elements, the dtype and the device.
        owners: The rank that owns each one, or none.
        settings: How they are added.
    """
    tensors = [(count, dtype.itemsize, (dtype, device)) for count, dtype, device in sizes]
    if owners:
        return SumLayout(make_owned_buckets(tensors, owners, settings.replicas, settings.limit), settings)
    return SumLayout(make_buckets(tensors, settings.limit), settings)


@lru_cache(_KEPT)
def layout_of_parts(count: int, dtype: torch.dtype, settings: SumSettings) -> SumLayout:
    """Return the layout for one tensor of ``count`` elements per rank, of which each rank gets its own's sum."""
    most = max(1, settings.limit // settings.replicas // dtype.itemsize)
    ranges = [(begin, min(begin + most, count)) for begin in range(0, count, most)]
    return SumLayout(
        [Bucket(tuple(TensorRange(rank, *each) for rank in range(settings.replicas))) for each in ranges], settings
    )
