"""Building blocks of transports: a pending operation that its transport completes, and the state that all of them share."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from adaptra.errors import PeerLostError, TransportError
from adaptra.runtime.transports.base import Identity, Pending, Transport, now
from adaptra.runtime.world.world import Attempt


def wait_for(event: threading.Event, timeout: float | None) -> bool:
    """Wait for an event, however long ``timeout`` is.

    Returns:
        False if the time is over before.
    """
    return event.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))


class Completion(Pending):
    """A :class:`Pending` that its transport completes or fails once; later calls are ignored.

    Attributes:
        attempt: The attempt in which it was posted.
        use: Called by the thread that waits before it gets the tensors of a message that has arrived.
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.attempt = Attempt()
        self.sent_at = 0.0
        self.departed_at = 0.0
        self.arrived_at = 0.0
        self.use: Callable[[], None] | None = None
        self._tensors: tuple[Tensor, ...] = ()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._event = threading.Event()

    @property
    def done(self) -> bool:
        """True if :meth:`wait` returns or raises at once."""
        return self._event.is_set()

    def complete(
        self, tensors: tuple[Tensor, ...] = (), sent_at: float = 0.0, arrived_at: float = 0.0, *, asked_at: float = -math.inf
    ) -> None:
        """Complete the operation, because the message has arrived or been sent.

        Args:
            tensors: The tensors of a received message.
            sent_at: The time of posting at the sender, seconds.
            arrived_at: The time of arrival, seconds.
            asked_at: The time of the receiver's request, seconds, if the message may have waited for it.
        """
        with self._lock:
            if self._event.is_set():
                return
            self._tensors, self.sent_at, self.arrived_at = tensors, sent_at, arrived_at
            self.departed_at = max(sent_at, asked_at)
            self._event.set()

    def fail(self, error: Exception) -> None:
        """Fail the operation, because the message will never arrive."""
        with self._lock:
            if self._event.is_set():
                return
            self._error = error
            self._event.set()

    def wait(self, timeout: float | None = None) -> tuple[Tensor, ...]:
        """See :meth:`Pending.wait`."""
        if not wait_for(self._event, timeout):
            raise TransportError(f"{self.identity}: not exchanged within {timeout} s")
        if self._error is not None:
            raise self._error
        if self.use is not None:
            self.use()
        return self._tensors


T = TypeVar("T", bound=Completion)


class PendingOperations:
    """The state that all transports share: the attempt, the receives posted per rank, the operations, and the error that ended
    them.

    Args:
        rank: The rank whose transport this is.
        world_size: The number of ranks.

    Attributes:
        attempt: The attempt of new operations.
        dropped: The number of messages of earlier attempts that were dropped.
        held: The receives that were not released, where the transport keeps no more of them.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.attempt = Attempt()
        self.dropped = 0
        self.held: set[Completion] = set()
        self._rank = rank
        self._world_size = world_size
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._pending: dict[Completion, int | None] = {}

    def post(self, peer: int, identity: Identity, is_receive: bool, make: Callable[[Identity], T] = Completion) -> T:
        """Add a new pending operation with ``peer``, made by ``make``, and return it.

        Raises:
            TransportError: ``peer`` is not another rank, or the error that ended the transport.
        """
        if not 0 <= peer < self._world_size or peer == self._rank:
            direction = "receive from" if is_receive else "send to"
            raise TransportError(
                f"{direction} rank {peer}: {identity}: "
                f"expected another rank of 0..{self._world_size - 1}, this is rank {self._rank}"
            )
        pending = make(identity)
        with self._lock:
            if self._error is not None:
                raise self._error
            pending.attempt = self.attempt
            self._pending[pending] = peer if is_receive else None
        return pending

    def begin(self, attempt: Attempt) -> None:
        """Begin a later attempt: fail the operations of the present one.

        Raises:
            TransportError: The attempt is not later.
            Exception: The error that ended the transport.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if attempt <= self.attempt:
                raise TransportError(f"{attempt}: expected a later one than {self.attempt}")
            before, self.attempt = self.attempt, attempt
            pending, self._pending = list(self._pending), {}
        for each in pending:
            each.fail(TransportError(f"{each.identity}: {before} has ended, {attempt} has begun"))

    def drop(self, count: int = 1) -> None:
        """Count messages of earlier attempts."""
        with self._lock:
            self.dropped += count

    def settle(self, pending: Completion) -> None:
        """Forget an operation that was completed or failed."""
        with self._lock:
            self._pending.pop(pending, None)

    def fail(self, pending: Completion, error: Exception) -> None:
        """Fail an operation, and with it all others, now and later. A message that may be lost with its peer is lost alone."""
        if not (pending.identity.may_be_lost and isinstance(error, PeerLostError)):
            self.end(error)
        pending.fail(error)
        self.settle(pending)

    def waiting_for(self, rank: int) -> Identity | None:
        """Return the oldest receive that waits for ``rank``, or None."""
        with self._lock:
            waiting = (pending for pending, source in self._pending.items() if source == rank and not pending.done)
            return next((pending.identity for pending in waiting), None)

    def finish_sends(self, seconds: float) -> None:
        """Wait for the sends that are under way, until one fails or the time is over."""
        deadline = now() + seconds
        with self._lock:
            sends = [pending for pending, source in self._pending.items() if source is None]
        with contextlib.suppress(Exception):
            for pending in sends:
                pending.wait(max(0.0, deadline - now()))

    def has_pending(self) -> bool:
        """Return True if an operation was posted and not settled."""
        with self._lock:
            return bool(self._pending)

    def end(self, error: Exception) -> bool:
        """Fail all operations, now and later.

        Returns:
            False if the transport had ended before.
        """
        with self._lock:
            if self._error is not None:
                return False
            self._error = error
            pending, self._pending = list(self._pending), {}
        for each in pending:
            each.fail(error)
        return True


class GuardedTransport(Transport):
    """A transport whose operations a :class:`PendingOperations` keeps."""

    _guard: PendingOperations

    @property
    def attempt(self) -> Attempt:
        """See :meth:`Transport.attempt`."""
        return self._guard.attempt

    def waiting_for(self, rank: int) -> Identity | None:
        """See :meth:`Transport.waiting_for`."""
        return self._guard.waiting_for(rank)


def peer_lost(rank: int, identity: Identity, text: str) -> PeerLostError:
    """Return the error of a message whose other side, ``rank``, is lost; ``text`` is the system's own."""
    where = f"edge {identity.source}→{identity.destination} failed at {identity.op} of step {identity.step}"
    return PeerLostError(f"rank {rank} is lost: {where}: {text}", rank=rank, edge=identity.edge, op=identity.op)
