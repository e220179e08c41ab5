"""What host threads know of streams: a thread that waits for a stream knows its work, and passes that on with locks and queues.

A lock, and all that Python builds of locks, carries what the thread knew that released it to the thread that takes it. That is
the order that thread sanitizers go by. It misses no order; an order by chance may hide a fault.
"""

from __future__ import annotations

import _thread
import queue
import threading
from typing import Any

Clock = dict[tuple[int, int], int]
"""How much of each stream's work is done: by device and stream, the number of its last piece of work."""

_allocate = _thread.allocate_lock
_local = threading.local()


def merge(into: Clock, other: Clock) -> None:
    """Have ``into`` know what ``other`` knows."""
    for line, tick in other.items():
        if into.get(line, 0) < tick:
            into[line] = tick


def own_clock() -> Clock:
    """Return what the calling thread knows; it is changed in place."""
    try:
        return _local.clock
    except AttributeError:
        _local.clock = Clock()
        return _local.clock


class WatchedLock:
    """A lock that passes on what the thread knew that released it."""

    def __init__(self) -> None:
        self._lock = _allocate()
        self._clock = Clock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See :meth:`threading.Lock.acquire`."""
        if got := self._lock.acquire(blocking, timeout):
            merge(own_clock(), self._clock)
        return got

    def release(self) -> None:
        """See :meth:`threading.Lock.release`."""
        merge(self._clock, own_clock())
        self._lock.release()

    def locked(self) -> bool:
        """See :meth:`threading.Lock.locked`."""
        return self._lock.locked()

    def _at_fork_reinit(self) -> None:
        self._lock = _allocate()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


def watch() -> None:
    """Make Python's locks, conditions, events, queues and threads carry what threads know."""
    patched: Any = threading
    patched.Lock = patched._allocate_lock = WatchedLock
    patched._CRLock = None  # threading.RLock then makes its form in Python, of locks
    patched_queue: Any = queue
    patched_queue.SimpleQueue = patched_queue._PySimpleQueue
    start, join = threading.Thread.start, threading.Thread.join

    def started(thread: threading.Thread) -> None:
        known, run = dict(own_clock()), thread.run
        at_end = Clock()

        def run_knowing() -> None:
            merge(own_clock(), known)
            try:
                run()
            finally:
                at_end.update(own_clock())

        marked: Any = thread
        marked.run, marked.fake_cuda_clock = run_knowing, at_end
        start(thread)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive():
            merge(own_clock(), getattr(thread, "fake_cuda_clock", Clock()))

    patched.Thread.start, patched.Thread.join = started, joined
