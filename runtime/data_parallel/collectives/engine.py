"""Runs the rounds of a sum over a process group of torch.distributed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from adaptra.runtime.data_parallel.collectives.buckets import bucket_bytes, make_buckets
from adaptra.runtime.data_parallel.collectives.memory import SpareMemory
from adaptra.runtime.data_parallel.collectives.rounds import Algorithm, TermMessage, direct
from adaptra.runtime.data_parallel.collectives.terms import Terms

_Flying = tuple[TermMessage, Tensor, dist.Work | None]


class GroupSum:
    """The canonical sum, see :mod:`.fold`, over the ranks of a group. It keeps the memory of what arrives for the next one.

    Args:
        group: Its ranks in the order of the sum.
        algorithm: The rounds; all give the same bits.
        limit: The most bytes of a bucket, or None for :func:`.buckets.bucket_bytes`.
        dtype: The least precise dtype of additions, or None for that of the tensors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        algorithm: Algorithm = direct,
        limit: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._group = group
        self._replicas, self._rank = group.size(), group.rank()
        self._algorithm = algorithm
        self._limit = limit or bucket_bytes(self._replicas)
        self._dtype = dtype
        self._memory = SpareMemory()
        self._through_host = dist.get_backend(group) == "gloo"

    def combine(self, tensors: Sequence[Tensor], *, mean: bool) -> None:
        """Replace tensors by their sum or mean over the group's ranks, which call it together.

        A complex tensor is added, and divided, as its real and imaginary parts. The bits of a NaN are not specified.

        Args:
            tensors: Of the same shapes and dtypes on all ranks, dense.
            mean: Whether the sum is divided by the number of ranks.

        Raises:
            RuntimeError: A message failed or took longer than the group's timeout.
        """
        if self._replicas == 1:
            return
        real = [torch.view_as_real(one.detach()) if one.is_complex() else one.detach() for one in tensors]
        flat = [one.contiguous() for one in real]
        self._run(flat, mean)
        for tensor, result in zip(real, flat, strict=True):
            if tensor is not result:
                tensor.copy_(result)

    def _run(self, tensors: Sequence[Tensor], mean: bool) -> None:
        buckets = make_buckets([(one.numel(), one.element_size(), (one.dtype, one.device)) for one in tensors], self._limit)
        device = torch.device("cpu") if self._through_host else None
        terms = Terms(tensors, buckets, self._replicas, self._rank, mean, self._memory, self._dtype, device)
        rounds = [
            [one for one in each if terms.size(one.value.part)]
            for each in _rounds(self._algorithm, self._replicas, len(buckets) * self._replicas, self._rank)
        ]
        left = Counter(one.value.part // self._replicas for each in rounds for one in each)
        flying: deque[_Flying] = deque()

        def finish() -> None:
            message, tensor, work = flying.popleft()
            if work is not None:
                work.wait()
            if message.destination == self._rank:
                terms.arrived(message.value, tensor)
            bucket = message.value.part // self._replicas
            left[bucket] -= 1
            if not left[bucket]:
                terms.end_bucket(bucket)

        # A message of gloo travels at once if its receive waits for it. NCCL pairs a round's send with its receive.
        ahead = self._replicas - 1 if self._through_host else 0
        self._begin([], rounds[:ahead], terms, flying)
        for moment, each in enumerate(rounds):
            while not all(terms.has(one.value) for one in each if one.source == self._rank):
                finish()
            self._begin(each, rounds[moment + ahead : moment + ahead + 1], terms, flying)
        while flying:
            finish()

    def _begin(
        self, sends: Iterable[TermMessage], receives: Iterable[Sequence[TermMessage]], terms: Terms, flying: deque[_Flying]
    ) -> None:
        """Begin this rank's receives of some rounds and its sends of one."""
        arriving = [(one, terms.place(one.value)) for each in receives for one in each if one.destination == self._rank]
        leaving = [(one, terms.value(one.value)) for one in sends if one.source == self._rank]
        if self._through_host:
            flying += [(one, tensor, self._group.recv([tensor], one.source, 0)) for one, tensor in arriving]
            flying += [(one, tensor, self._group.send([tensor], one.destination, 0)) for one, tensor in leaving]
        elif arriving or leaving:
            operations = [
                *(dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=one.source) for one, tensor in arriving),
                *(dist.P2POp(dist.isend, tensor, group=self._group, group_peer=one.destination) for one, tensor in leaving),
            ]
            works = dist.batch_isend_irecv(operations)
            # NCCL gives one work for the whole batch, other backends one for each message.
            padded = [*works, *[None] * (len(operations) - len(works))]
            flying += [(*message, work) for message, work in zip([*arriving, *leaving], padded, strict=True)]


@lru_cache(maxsize=16)
def _rounds(algorithm: Algorithm, replicas: int, parts: int, rank: int) -> tuple[tuple[TermMessage, ...], ...]:
    found = groupby(algorithm(replicas, parts, rank), key=lambda message: message.round)
    return tuple(tuple(messages) for _, messages in found)
