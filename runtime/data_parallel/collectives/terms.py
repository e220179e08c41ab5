"""What one replica holds of a sum: its own terms, those that have arrived, and the results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaptra.runtime.data_parallel.collectives.buckets import Bucket, part_of
from adaptra.runtime.data_parallel.collectives.fold import fold
from adaptra.runtime.data_parallel.collectives.rounds import Value


class Terms:
    """One replica's values in a sum over replicas. It sends nothing itself.

    A bucket exists from its first use until :meth:`end_bucket`. The replica's own term of a part is overwritten only by that
    part's result.

    Args:
        tensors: The terms, of real dtypes; in the end they hold the results.
        buckets: Their buckets.
        replicas: The number of replicas.
        rank: This replica.
        mean: Whether the sum is divided by the number of replicas.
        device: The device of what travels, or None for the tensors' own.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        buckets: Sequence[Bucket],
        replicas: int,
        rank: int,
        mean: bool,
        device: torch.device | None = None,
    ) -> None:
        self._tensors = tensors
        self._buckets = buckets
        self._replicas = replicas
        self._rank = rank
        self._divisor = replicas if mean else 1
        self._device = device
        self._flat: dict[int, Tensor] = {}
        self._held: dict[int, dict[tuple[int, int], Tensor]] = {}

    def size(self, part: int) -> int:
        """Return the number of elements of a part; it may be 0."""
        bucket, index = divmod(part, self._replicas)
        where = part_of(sum(one.end - one.begin for one in self._buckets[bucket]), self._replicas, index)
        return where.stop - where.start

    def has(self, value: Value) -> bool:
        """Return True if :meth:`value` can return a value by now."""
        held = self._held.get(value.part, {})
        for end in range(value.end, value.first, -1):
            if (value.first, end) in held or (value.first, end) == (self._rank, self._rank + 1):
                return True
            if value.first != 0 or not ((end - 1, end) in held or end - 1 == self._rank):
                return False
        return False

    def value(self, value: Value) -> Tensor:
        """Return a value to send, added up if it is not yet. It must not change while it is sent."""
        part, first, end = value
        held = self._held.setdefault(part, {})
        own = (self._rank, self._rank + 1)
        if (first, end) == own:
            return self._own(part)
        if (first, end) not in held:
            known = next((until for until in range(end - 1, 1, -1) if (0, until) in held), 1)
            spans = [(0, known), *((one, one + 1) for one in range(known, end))]
            terms = [self._own(part) if span == own else held.pop(span) for span in spans]
            if end == self._replicas:
                # Until the last addition the own term stays as it is, because it may come late in the order.
                spare = terms[1] if spans[0] == own else terms[0]
                if len(terms) > 2:
                    fold(terms[:-1], spare)
                    terms = [spare, terms[-1]]
                fold(terms, self._own(part), self._divisor)
                held[0, end] = self._own(part)
            else:
                made = torch.empty_like(terms[0]) if spans[0] == own else terms[0]
                fold(terms, made)
                held[0, end] = made
        return held[first, end]

    def place(self, value: Value) -> Tensor:
        """Return the memory for a value that will arrive."""
        own = self._own(value.part)
        return own if (value.first, value.end) == (0, self._replicas) else torch.empty_like(own)

    def arrived(self, value: Value, tensor: Tensor) -> None:
        """Record a value that has arrived in the memory of :meth:`place`."""
        self._held.setdefault(value.part, {})[value.first, value.end] = tensor

    def end_bucket(self, bucket: int) -> None:
        """Write a bucket's results to the tensors. Nothing of it may be under way.

        Raises:
            AssertionError: A part has no result yet.
        """
        for part in range(bucket * self._replicas, (bucket + 1) * self._replicas):
            if self.size(part):
                self.value(Value(part, 0, self._replicas))
        flat = self._flat.pop(bucket, None)
        for part in range(bucket * self._replicas, (bucket + 1) * self._replicas):
            self._held.pop(part, None)
        if flat is None:
            return
        begin = 0
        for piece in self._buckets[bucket]:
            end = begin + piece.end - piece.begin
            tensor = self._tensors[piece.tensor]
            if not tensor.is_contiguous():  # the whole of it: a piece of a tensor of other strides is packed alone
                whole = tensor.reshape(-1)
                whole[piece.begin : piece.end] = flat[begin:end]
                tensor.copy_(whole.view(tensor.shape))
            elif flat.data_ptr() != tensor.view(-1)[piece.begin :].data_ptr():
                tensor.view(-1)[piece.begin : piece.end] = flat[begin:end]
            begin = end

    def _own(self, part: int) -> Tensor:
        bucket, index = divmod(part, self._replicas)
        if bucket not in self._flat:
            pieces = [self._tensors[one.tensor].reshape(-1)[one.begin : one.end] for one in self._buckets[bucket]]
            # One piece of a contiguous tensor travels from where it is.
            packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            self._flat[bucket] = packed if self._device is None else packed.to(self._device)
        flat = self._flat[bucket]
        return flat[part_of(flat.numel(), self._replicas, index)]
