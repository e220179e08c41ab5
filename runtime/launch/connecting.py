"""Connection of the ranks of a job, with detection of ranks that fail meanwhile.

A rank that joins a group waits for others in the C++ of torch or of the engine, which does not notice dead ranks. So it waits
on a thread of its own, while the job's membership watches the others as it does in training.

The first event ends the wait: the connection is made, this rank fails, or another is lost. On a failure the thread's
connections to the store are closed, which ends its waits for the store. A thread that waits for a lost rank itself is
abandoned. So is one that waits for a rank that has given up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

import torch

from adaptra.errors import AdaptraError, PeerLostError, TransportError
from adaptra.runtime.control_store.spare_clients import Borrower
from adaptra.runtime.membership.process_membership import Listener, ProcessMembership
from adaptra.runtime.membership.timing import HeartbeatTiming

T = TypeVar("T")
Item = TypeVar("Item")

_CLOSE_SECONDS: Final = 2.0
"""Seconds in which a thread that waited for the store comes to its end, before this process may."""


def connect(membership: ProcessMembership, rank: int, make: Callable[[], T]) -> T:
    """Connect this rank to others by ``make``. All ranks of the job, which have just met, call it at about the same time.

    Args:
        membership: Tells whether another rank is lost meanwhile.
        rank: This rank in the job.
        make: Makes the connection and may wait for other ranks in any way; runs on a thread.

    Returns:
        The result of ``make``.

    Raises:
        PeerLostError: Another rank failed or died meanwhile; names it.
        TransportError: Torch could not connect, and whoever finds which rank is lost does so after this.
        Exception: An error of ``make``, which is also reported to the other ranks.
    """
    happened: SimpleQueue[_Done[T] | BaseException] = SimpleQueue()
    listener = Listener(happened.put)
    borrower = Borrower()
    thread = threading.Thread(
        target=_run, args=(make, happened, _device(), borrower), name=f"adaptra rank {rank} connects", daemon=True
    )
    try:
        membership.add(listener)
        thread.start()
        outcome = happened.get()
        if isinstance(outcome, BaseException) and membership.tells_of_losses and _may_come_of_a_loss(outcome):
            outcome = _cause_of(outcome, happened)
        if isinstance(outcome, _Done):
            if membership.lost is not None:
                raise membership.lost
            return outcome.made
        if outcome is membership.lost:
            raise outcome
        if not membership.tells_of_losses and _is_of_torch(outcome):
            raise TransportError(f"rank {rank}: can't connect to the other ranks: {outcome}") from outcome
        cause = membership.fail(listener, outcome)
        if not _may_come_of_a_loss(outcome):
            raise outcome  # this rank's own mistake is raised as such, even if another rank made it first
        raise cause from (None if cause is outcome else outcome)
    except BaseException:
        # If a thread still waited for the store when this process ends, C++ would abort the process. It would also hold the
        # client by which groups meet.
        borrower.give_up()
        if membership.tells_of_losses:  # else the job goes on, and this process does not end
            thread.join(_CLOSE_SECONDS)
        raise
    finally:
        membership.remove(listener)


def on_threads(run: Callable[[Item], T], items: Sequence[Item], device: torch.device) -> list[T]:
    """Call a function for each item, each on a thread of its own, as these calls may wait for each other.

    Args:
        run: The function.
        items: The items. For a single one there is no thread.
        device: The current device of the threads.

    Returns:
        The results, in order.

    Raises:
        Exception: The first error. Other threads are abandoned.
    """
    if len(items) == 1:
        return [run(items[0])]
    happened: SimpleQueue[_Done[tuple[int, T]] | BaseException] = SimpleQueue()

    def numbered(number: int, item: Item) -> tuple[int, T]:
        return number, run(item)

    for number, item in enumerate(items):
        arguments = partial(numbered, number, item), happened, device.index, Borrower.current()
        threading.Thread(target=_run, args=arguments, name=f"adaptra {number} of {len(items)}", daemon=True).start()
    results: dict[int, T] = {}
    for _ in items:
        outcome = happened.get()
        if isinstance(outcome, BaseException):
            raise outcome
        number, result = outcome.made
        results[number] = result
    return [results[number] for number in range(len(items))]


class _Done(Generic[T]):
    """The result of a connection, as opposed to its error."""

    def __init__(self, made: T) -> None:
        self.made = made


def _run(
    make: Callable[[], T], happened: SimpleQueue[_Done[T] | BaseException], device: int | None, borrower: Borrower | None
) -> None:
    try:
        if device is not None:  # each thread has a current device of its own
            torch.cuda.set_device(device)
        with nullcontext() if borrower is None else borrower.here():
            happened.put(_Done(make()))
    except BaseException as error:
        happened.put(error)


def _device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _may_come_of_a_loss(error: BaseException) -> bool:
    """Return True if the end of another rank may be the cause, for example of a connection that breaks."""
    if isinstance(error.__cause__, TransportError) or _is_of_torch(error):
        return True
    return isinstance(error, TransportError) and not isinstance(error, PeerLostError)


def _is_of_torch(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and not isinstance(error, AdaptraError)


def _cause_of(error: BaseException, happened: SimpleQueue[_Done[T] | BaseException]) -> BaseException | _Done[T]:
    """Return the loss that caused an error, once it is noticed; else the error."""
    timing = HeartbeatTiming()
    try:
        return happened.get(timeout=timing.lost_after + 2 * timing.interval)
    except Empty:
        return error
