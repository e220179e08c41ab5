"""What one replica holds of a sum: its own terms, those that have arrived, and the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from adaptra.collectives.buckets import Bucket, TensorRange
from adaptra.collectives.rounds import Value
from adaptra.runtime.data_parallel.collectives.fold import dtype_of_sum, fold
from adaptra.runtime.data_parallel.collectives.memory import SpareMemory

LEAST_AHEAD_BYTES: Final = 64 * 1024
"""The smallest part that is added ahead. The additions of a smaller one take no longer than the call for them."""


class Terms:
    """One replica's values in a sum over replicas. It sends nothing itself.

    A bucket exists from its first use until :meth:`end_bucket`. The replica's own term of a part is overwritten only by that
    part's result.

    Args:
        get: Returns a term by its tensor's number: contiguous, of a real dtype. In the end it holds the result. It is asked for
            only when its bucket is used first, so it may be computed until then.
        like: Tensors of the terms' dtypes and devices.
        buckets: Their buckets.
        replicas: The number of replicas.
        rank: This replica.
        mean: Whether the sum is divided by the number of replicas.
        memory: The memory of what arrives.
        dtype: The least precise dtype of additions, see :func:`.fold.dtype_of_sum`.
        results: By bucket, the memory of the result whose part has this replica's number; None if results replace terms.
    """

    def __init__(
        self,
        get: Callable[[int], Tensor],
        like: Sequence[Tensor],
        buckets: Sequence[Bucket],
        replicas: int,
        rank: int,
        mean: bool,
        memory: SpareMemory,
        dtype: torch.dtype | None = None,
        results: Sequence[Tensor] | None = None,
    ) -> None:
        self._get = get
        self._like = [like[bucket.pieces[0].tensor] for bucket in buckets]
        self._buckets = buckets
        self._slices = [bucket.parts(replicas) for bucket in buckets]
        self._replicas = replicas
        self._rank = rank
        self._divisor = replicas if mean else 1
        self._memory = memory
        self._dtype = dtype
        self._results = results
        self._packed: dict[int, tuple[Tensor | None, list[Tensor]]] = {}
        self._held: dict[int, dict[tuple[int, int], Tensor]] = {}

    def size(self, part: int) -> int:
        """Return the number of elements of a part; it may be 0."""
        bucket, index = divmod(part, self._replicas)
        where = self._slices[bucket][index]
        return where.stop - where.start

    def bucket(self, value: Value) -> int:
        """Return the bucket of a value."""
        return value.part // self._replicas

    def is_result(self, value: Value) -> bool:
        """Return whether a value is the sum of all terms."""
        return (value.first, value.end) == (0, self._replicas)

    def is_open(self, value: Value) -> bool:
        """Return whether the terms of a value's bucket have been asked for."""
        return self.bucket(value) in self._packed

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
            terms = [self._own(part) if span == own else held[span] for span in spans]
            held[0, end] = self.place(value)
            fold(terms, held[0, end], self._divisor if end == self._replicas else 1, self._sum_dtype(part))
        return held[first, end]

    def place(self, value: Value) -> Tensor:
        """Return the memory for a value that will arrive. A result's is that of the own term, which has been added by then."""
        part, first, end = value
        if self.is_result(value):
            return self._own(part) if self._results is None else self._results[self.bucket(value)]
        like = self._like[part // self._replicas]
        dtype = like.dtype if end == first + 1 else self._sum_dtype(part)
        return self._memory.take(self.size(part), dtype, like.device)

    def parts(self, bucket: int) -> range:
        """Return the parts of a bucket."""
        return range(bucket * self._replicas, (bucket + 1) * self._replicas)

    def large_parts(self) -> dict[int, int]:
        """Return the parts of which some terms are added ahead of the last one, and that one's number; none of two terms."""
        return {
            part: self._replicas - 1
            for bucket, like in enumerate(self._like if self._replicas > 2 else ())
            for part in self.parts(bucket)
            if self.size(part) * like.itemsize >= LEAST_AHEAD_BYTES
        }

    def add_ahead(self, part: int, end: int) -> bool:
        """Add up the terms of a part from the first one on, as far as they are there, but none from number ``end`` on.

        The sum takes the memory of an arrived value that is in it, and that of the others returns. Where no such value has the
        sum's dtype, nothing is added. What is in the sum can't be asked for any more.

        Args:
            part: The part.
            end: At most the number of the last term: the result replaces the own term, which may still be under way.

        Returns:
            Whether something was added.
        """
        held = self._held.get(part, {})
        known = max((until for first, until in held if first == 0), default=0)
        spans = [(0, known)] if known else []
        for term in range(known, end):
            is_own = term == self._rank and part // self._replicas in self._packed
            if not is_own and (term, term + 1) not in held:
                break
            spans.append((term, term + 1))
        arrived = [held[span] for span in spans if span in held]
        dtype = self._sum_dtype(part)
        out = next((tensor for tensor in arrived if tensor.dtype == dtype), None)
        last = spans[-1][1] if spans else 0
        # To add two values ahead saves a third of what it costs. That waits for a third value, unless there will be none.
        if out is None or len(spans) < (2 if last == end else 3):
            return False
        fold([held[span] if span in held else self._own(part) for span in spans], out, dtype=dtype)
        for span in spans:
            held.pop(span, None)
        for tensor in arrived:
            if tensor is not out:
                self._memory.give_back(tensor)
        held[0, last] = out
        return True

    def arrived(self, value: Value, tensor: Tensor) -> None:
        """Record a value that has arrived in the memory of :meth:`place`."""
        self._held.setdefault(value.part, {})[value.first, value.end] = tensor

    def end_bucket(self, bucket: int) -> None:
        """Write a bucket's results to the tensors. Nothing of it may be under way.

        Raises:
            KeyError: A part has no result yet.
        """
        for part in self.parts(bucket):
            if self.size(part):
                self.value(Value(part, 0, self._replicas))
        self._write(bucket, slice(0, self._slices[bucket][-1].stop))
        self._forget(bucket)

    def end_own(self, bucket: int) -> None:
        """Add up the part of a bucket whose number is this replica's. Ends the bucket, whose other parts have no result here.

        Raises:
            KeyError: A term of it has not arrived.
        """
        part = bucket * self._replicas + self._rank
        if self.size(part):
            self.value(Value(part, 0, self._replicas))
            if self._results is None:
                self._write(bucket, self._slices[bucket][self._rank])
        self._forget(bucket)

    def _write(self, bucket: int, results: slice) -> None:
        """Write results, which are elements of a bucket, to the tensors. They are there already if no bucket was packed."""
        whole, _ = self._parts(bucket)
        begin = 0
        for piece in self._buckets[bucket].pieces if whole is not None else ():
            end = begin + piece.end - piece.begin
            if whole is not None and results.start <= begin and end <= results.stop:
                target = self._piece(piece)
                if target.data_ptr() != whole.data_ptr():
                    target.copy_(whole[begin:end])
            begin = end

    def _forget(self, bucket: int) -> None:
        for part in self.parts(bucket):
            for tensor in self._held.pop(part, {}).values():
                self._memory.give_back(tensor)
        whole, _ = self._packed.pop(bucket)
        if whole is not None:
            self._memory.give_back(whole)

    def _own(self, part: int) -> Tensor:
        bucket, index = divmod(part, self._replicas)
        return self._parts(bucket)[1][index]

    def _parts(self, bucket: int) -> tuple[Tensor | None, list[Tensor]]:
        """Return a bucket as one tensor and its parts. Pieces that are parts travel from where they are, without the tensor."""
        if bucket not in self._packed:
            pieces, whole, slices = list(map(self._piece, self._buckets[bucket].pieces)), None, self._slices[bucket]
            if [piece.numel() for piece in pieces] == [each.stop - each.start for each in slices]:
                parts = pieces
            else:
                whole = pieces[0]
                if len(pieces) > 1:
                    whole = self._memory.take(slices[-1].stop, whole.dtype, whole.device)
                    for place, piece in zip(whole.split([one.numel() for one in pieces]), pieces, strict=True):
                        place.copy_(piece)
                parts = [whole[each] for each in slices]
            self._packed[bucket] = whole, parts
        return self._packed[bucket]

    def _piece(self, where: TensorRange) -> Tensor:
        return self._get(where.tensor).view(-1)[where.begin : where.end]

    def _sum_dtype(self, part: int) -> torch.dtype:
        return dtype_of_sum(self._like[part // self._replicas].dtype, self._dtype, mean=self._divisor != 1)
