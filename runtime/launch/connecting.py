"""Connecting to the other ranks of a job while all of them live.

Who makes a group or sets up connections waits in the C++ of torch or of the engine for ranks to come, and nothing there tells
of one that has died. So that waits on a thread of its own, and beside it the ranks watch each other as they do in training. The
first thing to happen ends the wait: the connection is made, this rank fails, or another is lost. Then the thread's connections
to the store are ended, which ends what it waits for there. One that waits for a lost rank itself is left behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

import torch
from torch.distributed import Store

from adaptra.errors import AdaptraError, PeerLostError, TransportError
from adaptra.runtime.control_store.forked_children import connections_to, end_connections
from adaptra.runtime.control_store.stores import Connection
from adaptra.runtime.membership.membership import Membership
from adaptra.runtime.transports.process_groups import end_keys

T = TypeVar("T")

INTERVAL: Final = 0.5
"""Seconds between two heartbeats of a rank that connects."""
LOST_AFTER: Final = 10.0
"""Seconds without one after which it is lost."""
_CLOSE_SECONDS: Final = 2.0


def connect(name: str, store: Store, rank: int, ranks: int, make: Callable[[], T]) -> T:
    """Make what joins this rank to others. All ranks of the job call it at about the same time: they have just met.

    Args:
        name: No other call's of this job.
        store: The keys under that name.
        rank, ranks: This rank in the job, and how many there are.
        make: Waits for other ranks in any way; runs on a thread.

    Returns:
        What ``make`` returns.

    Raises:
        PeerLostError: Another rank failed or died meanwhile; names it.
        Exception: What ``make`` raises; the other ranks are told.
    """
    if ranks == 1:
        return make()
    happened: SimpleQueue[_Done[T] | BaseException] = SimpleQueue()
    membership = Membership(Connection(store), rank, ranks, happened.put, interval=INTERVAL, lost_after=LOST_AFTER)
    before = connections_to(store)
    thread = threading.Thread(target=_run, args=(make, happened, _device()), name=f"adaptra rank {rank} connects", daemon=True)
    try:
        thread.start()
        found = happened.get()
        if isinstance(found, BaseException) and _may_come_of_a_loss(found):
            found = _cause_of(found, happened)
        if isinstance(found, _Done):
            membership.close()
            if membership.lost is not None:
                raise membership.lost
            end_keys(name, rank, ranks)
            return found.made
        if found is membership.lost:
            raise found
        cause = membership.fail(found)
        if not _may_come_of_a_loss(found):
            raise found  # this rank's own mistake is told as such, though another may have made it first
        raise cause from (None if cause is found else found)
    except BaseException:
        # Whoever waits for the store must not find that gone when this process is about to end: C++ ends it by an abort then.
        end_connections(connections_to(store) - before)
        thread.join(_CLOSE_SECONDS)
        raise
    finally:
        membership.close()


class _Done(Generic[T]):
    """What was made, as opposed to what was raised."""

    def __init__(self, made: T) -> None:
        self.made = made


def _run(make: Callable[[], T], happened: SimpleQueue[_Done[T] | BaseException], device: int | None) -> None:
    try:
        if device is not None:  # each thread has one of its own
            torch.cuda.set_device(device)
        happened.put(_Done(make()))
    except BaseException as error:
        happened.put(error)


def _device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _may_come_of_a_loss(error: BaseException) -> bool:
    """Whether another rank's end may be behind it, such as a connection that breaks."""
    if isinstance(error.__cause__, TransportError):
        return True
    is_known = isinstance(error, AdaptraError) and not isinstance(error, TransportError)
    return isinstance(error, RuntimeError) and not is_known and not isinstance(error, PeerLostError)


def _cause_of(error: BaseException, happened: SimpleQueue[_Done[T] | BaseException]) -> BaseException | _Done[T]:
    """The loss that an error comes of, once it is noticed; else the error."""
    try:
        return happened.get(timeout=LOST_AFTER + 2 * INTERVAL)
    except Empty:
        return error
