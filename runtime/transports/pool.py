"""The pool of receive buffers, sized by the program.

A program states the number of messages of each shape that a rank may have posted or kept at a time. A receive that finds the
pool empty is a bug of ours and never allocates, because the planner's memory budget would then be wrong.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.transports.base import Identity, MessageLayout, describe_layout, layout_of

Buffer = TypeVar("Buffer")
_Key = tuple[int, MessageLayout]


class Pool(Generic[Buffer]):
    """Buffers per (source rank, layout of a message).

    Args:
        allocate: Makes the buffer of a message with these specs. Called by :meth:`reserve` only.
    """

    def __init__(self, allocate: Callable[[MessageSpec], Buffer]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._reserved: Counter[_Key] = Counter()
        self._used: Counter[_Key] = Counter()
        self._free: dict[_Key, list[Buffer]] = {}

    def reserve(self, counts: Mapping[tuple[int, MessageSpec], int]) -> None:
        """Have ``counts`` buffers, used or free, per source rank and message; see :meth:`.base.Transport.reserve`."""
        reserved: Counter[_Key] = Counter()
        specs_of: dict[_Key, MessageSpec] = {}
        for (rank, specs), count in counts.items():
            key = (rank, layout_of(specs))
            reserved[key] += count
            specs_of[key] = specs
        with self._lock:
            self._reserved = reserved
            kept = {key: self._free.get(key, [])[: max(0, count - self._used[key])] for key, count in reserved.items()}
            for key, buffers in kept.items():
                missing = reserved[key] - self._used[key] - len(buffers)
                buffers.extend(self._allocate(specs_of[key]) for _ in range(missing))
            self._free = kept

    def has_free(self, rank: int, identity: Identity) -> bool:
        """Return True if :meth:`take` would find a buffer."""
        with self._lock:
            return bool(self._free.get((rank, layout_of(identity.specs))))

    def take(self, rank: int, identity: Identity) -> Buffer:
        """Take a buffer for one message from ``rank``.

        Raises:
            AssertionError: None is left.
        """
        key = (rank, layout_of(identity.specs))
        with self._lock:
            free = self._free.get(key)
            if not free:
                raise AssertionError(
                    f"receive of {identity} from rank {rank}: all {self._reserved[key]} buffers reserved for "
                    f"{describe_layout(key[1])} are in use"
                )
            self._used[key] += 1
            return free.pop()

    def give(self, rank: int, identity: Identity, buffer: Buffer) -> None:
        """Give back a buffer; it is kept if it is still reserved."""
        key = (rank, layout_of(identity.specs))
        with self._lock:
            self._used[key] -= 1
            if self._used[key] + len(self._free.get(key, ())) < self._reserved[key]:
                self._free[key].append(buffer)
