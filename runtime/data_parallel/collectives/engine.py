"""Runs the rounds of a sum over a process group of torch.distributed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from adaptra.runtime.data_parallel.collectives.buckets import bucket_bytes, make_buckets
from adaptra.runtime.data_parallel.collectives.rounds import Algorithm, TermMessage, direct
from adaptra.runtime.data_parallel.collectives.terms import Terms

IN_FLIGHT: Final = 2
"""The most rounds under way. More would let several messages meet at one port, which TCP answers with losses."""


def combine(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, *, mean: bool, algorithm: Algorithm = direct, limit: int | None = None
) -> None:
    """Replace tensors by their canonical sum or mean over the ranks of a group, see :mod:`.fold`. All ranks call it together.

    A complex tensor is added, and divided, as its real and imaginary parts. The bits of a NaN are not specified.

    Args:
        tensors: Of the same shapes and dtypes on all ranks, dense.
        group: Its ranks in the order of the sum.
        mean: Whether the sum is divided by the number of ranks.
        algorithm: The rounds; all give the same bits.
        limit: The most bytes of a bucket, or None for :func:`.buckets.bucket_bytes`.

    Raises:
        RuntimeError: A message failed or took longer than the group's timeout.
    """
    replicas, rank = group.size(), group.rank()
    if replicas == 1:
        return
    real = [torch.view_as_real(one.detach()) if one.is_complex() else one.detach() for one in tensors]
    limit = limit or bucket_bytes(sum(one.nbytes for one in real), replicas)
    buckets = make_buckets([(one.numel(), one.element_size(), (one.dtype, one.device)) for one in real], limit)
    on_host = dist.get_backend(group) == "gloo"
    terms = Terms(real, buckets, replicas, rank, mean, torch.device("cpu") if on_host else None)
    rounds = _rounds(algorithm, replicas, len(buckets) * replicas, rank)
    left = Counter(message.value.part // replicas for each in rounds for message in each)
    flying: deque[list[tuple[TermMessage, Tensor, dist.Work | None]]] = deque()

    def finish() -> None:
        for message, tensor, work in flying.popleft():
            if work is not None:
                work.wait()
            if message.destination == rank:
                terms.arrived(message.value, tensor)
            bucket = message.value.part // replicas
            left[bucket] -= 1
            if not left[bucket]:
                terms.end_bucket(bucket)

    for each in rounds:
        while flying and not all(_is_ready(terms, message, rank) for message in each):
            finish()
        flying.append(_start(terms, each, rank, group))
        if len(flying) == IN_FLIGHT:
            finish()
    while flying:
        finish()


def _is_ready(terms: Terms, message: TermMessage, rank: int) -> bool:
    return message.source != rank or terms.has(message.value)


def _start(
    terms: Terms, messages: Sequence[TermMessage], rank: int, group: dist.ProcessGroup
) -> list[tuple[TermMessage, Tensor, dist.Work | None]]:
    begun: list[tuple[TermMessage, Tensor, dist.Work | None]] = []
    filled = [one for one in messages if terms.size(one.value.part)]
    operations: list[dist.P2POp] = []
    for message in filled:
        if message.source == rank:
            tensor = terms.value(message.value)
            operations.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=message.destination))
        else:
            tensor = terms.place(message.value)
            operations.append(dist.P2POp(dist.irecv, tensor, group=group, group_peer=message.source))
        begun.append((message, tensor, None))
    works = dist.batch_isend_irecv(operations) if operations else []
    # NCCL gives one work for the whole batch, gloo one for each message.
    padded = [*works, *[None] * (len(begun) - len(works))]
    begun = [(message, tensor, work) for (message, tensor, _), work in zip(begun, padded, strict=True)]
    nothing = torch.empty(0)
    return begun + [(one, nothing, None) for one in messages if not terms.size(one.value.part)]


@lru_cache(maxsize=16)
def _rounds(algorithm: Algorithm, replicas: int, parts: int, rank: int) -> tuple[tuple[TermMessage, ...], ...]:
    found = groupby(algorithm(replicas, parts, rank), key=lambda message: message.round)
    return tuple(tuple(messages) for _, messages in found)
