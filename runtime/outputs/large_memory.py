"""Memory of large outputs on a CPU, in large pages, which later steps use again once nothing refers to it.

The user keeps the outputs, so a step can't write to those of an earlier one. In new memory a copy mostly waits for the system,
which gives and clears each page at its first use. So memory that the user has dropped is kept for the next outputs of this
size. The system may take its pages back when it needs them.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from threading import RLock
from typing import Final

import torch
from torch import Tensor

LARGE: Final = 8 * 1024 * 1024
"""Bytes from which a tensor is worth pages of its own."""

_KEPT: Final = 4
"""The number of pieces of memory that are kept at a time."""

_PAGE: Final = 2 * 1024 * 1024
"""A multiple of this size begins where a large page does."""


class LargeMemory:
    """Pieces of memory without values. Any thread may use it."""

    def __init__(self) -> None:
        # A piece may be given back within any call, if that collects garbage.
        self._lock: Final = RLock()
        self._kept: list[mmap.mmap] = []

    def bytes(self, size: int) -> Tensor:
        """Return this many bytes. Their memory is given back when no tensor refers to it."""
        length = -(-size // _PAGE) * _PAGE
        memory = self._take(length) or _map(length)
        view = memoryview(memory)
        # The tensor's storage holds the view, and nothing else does.
        weakref.finalize(view, self._give_back, memory).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8, count=size)

    def _take(self, length: int) -> mmap.mmap | None:
        with self._lock:
            memory = next((one for one in self._kept if len(one) == length), None)
            if memory is not None:
                self._kept.remove(memory)
            return memory

    def _give_back(self, memory: mmap.mmap) -> None:
        with suppress(OSError):
            memory.madvise(mmap.MADV_FREE)
        with self._lock:
            self._kept = [*self._kept, memory][-_KEPT:]


def is_available() -> bool:
    """Return whether the system has what this needs."""
    return hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_FREE")


def _map(length: int) -> mmap.mmap:
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
