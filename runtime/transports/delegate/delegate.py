"""Messages by way of the delegate: an engine in C++ that moves them from host memory while the rank computes.

A sent message is packed once, into page-aligned memory that the engine sends from. The engine receives a message into a slot,
and the received tensors are views of the slot. The engine's one thread serves all connections of a rank, and a Python thread
waits only for the message that it needs. The engine fails over between paths by itself; see ``csrc/delegate/``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from torch import Tensor

from adaptra import _C
from adaptra.errors import TransportError
from adaptra.graph.ops.specs import MessageSpec
from adaptra.program.transport_contract import Contract
from adaptra.runtime.transports.base import (
    ChannelClass,
    Identity,
    PathCounts,
    Pending,
    check_tensors,
    now,
)
from adaptra.runtime.transports.delegate.engine import StartedEngine
from adaptra.runtime.transports.delegate.engine_memory import EngineMessage, EngineMessages
from adaptra.runtime.transports.delegate.engine_pending import EnginePending
from adaptra.runtime.transports.delegate.rejected import RejectedConnections
from adaptra.runtime.transports.message_format import HEADER_BYTES, Header, copy_into, flat_bytes
from adaptra.runtime.transports.pending import GuardedTransport, PendingOperations, peer_lost
from adaptra.runtime.transports.pool import Pool
from adaptra.runtime.transports.staging.room import Room
from adaptra.runtime.world.world import Attempt

# Slots are granted when the program reserves them, so a message travels whether its receive is posted or not.
# A sent tensor is copied before send() returns.
CONTRACT: Final = Contract(send_waits_for_receiver=False, in_order=False)
_CLOSE_SECONDS: Final = 5.0
_LINGER_SECONDS: Final = 0.5
_PASSING_SLOTS: Final = 2
"""Slots for messages of one size to memory of the receiver's: one fills while another is copied."""


class DelegateTransport(GuardedTransport):
    """One rank's end of the delegate, see :func:`.join.join`.

    Args:
        started: The rank's engine, which this transport closes.
        on_close: Called once it is closed.

    Attributes:
        clock_offsets: For every rank, how far its clock is ahead of this one's, with the uncertainty; seconds.
    """

    contract = CONTRACT

    def __init__(self, started: StartedEngine, on_close: Callable[[], None] | None = None) -> None:
        self.rank = started.rank
        self.world_size = started.world_size
        self.store = started.store
        self.rdma_devices = started.rdma_devices
        self.clock_offsets = started.clock_offsets
        self._engine = started.engine
        self._guard = PendingOperations(self.rank, self.world_size)
        self._pool: Pool[Room | None] = Pool(self._make_room)
        self._lock = threading.Lock()
        self._sent: deque[EnginePending] = deque()
        self._passing: set[tuple[int, int]] = set()  # source and bytes of messages to memory of the receiver's
        self._messages = EngineMessages(self._engine, self._make_message)
        self._refusals = RejectedConnections(self._engine, self.rank)
        self._is_closed = False
        self._on_close = on_close

    def send(
        self, destination_rank: int, identity: Identity, tensors: Sequence[Tensor], *, posted_at: float | None = None
    ) -> Pending:
        """See :meth:`Transport.send`."""
        check_tensors(identity, tensors)
        self._sweep()
        pending = self._guard.post(destination_rank, identity, is_receive=False, make=EnginePending)
        pending.message = message = self._messages.free(identity.specs)
        pending.peer = destination_rank

        def start(there_at: float) -> None:
            self._start(pending, destination_rank, message, there_at if posted_at is None else posted_at)

        self._fill(message, tensors, start)
        return pending

    def receive(self, source_rank: int, identity: Identity, into: Tensor | None = None) -> Pending:
        """See :meth:`Transport.receive`."""
        self._refusals.look(now())
        pending = self._guard.post(source_rank, identity, is_receive=True, make=self._arriving_by)
        with self._lock:
            if pending.attempt < self._guard.attempt:
                return pending  # another thread has begun a later attempt, which fails this receive
            size = HEADER_BYTES + flat_bytes(identity.specs)
            if into is None:
                pending.room = self._pool.take(source_rank, identity)
            elif (source_rank, size) not in self._passing:
                self._passing.add((source_rank, size))
                self._engine.reserve(source_rank, size, _PASSING_SLOTS)
            pending.peer = pending.source_rank = source_rank
            pending.into = into
            self._guard.held.add(pending)
            request = self._engine.receive(source_rank, identity.channel, size)
        pending.begin(self.settle, request)
        self._expect(pending, source_rank)
        return pending

    def release(self, pending: Pending) -> None:
        """See :meth:`Transport.release`."""
        assert isinstance(pending, EnginePending), "every pending of this transport is one"
        if pending.attempt < self._guard.attempt:
            return
        self._release(pending)

    def _release(self, pending: EnginePending) -> None:
        self._guard.held.remove(pending)
        source_rank, pending.source_rank = pending.source_rank, None
        assert source_rank is not None, "only a received message is released, and once"
        self._give_back(pending)
        if pending.into is None:
            self._pool.give(source_rank, pending.identity, pending.room)

    def reserve(self, counts: Mapping[tuple[int, MessageSpec], int]) -> None:
        """See :meth:`Transport.reserve`. Connects to the ranks that will send messages, if not connected yet."""
        self._pool.reserve(counts)
        sizes: dict[tuple[int, int], int] = {}
        for (rank, specs), count in counts.items():
            key = (rank, HEADER_BYTES + flat_bytes(specs))
            sizes[key] = sizes.get(key, 0) + count
        for (rank, size), count in sizes.items():
            self._engine.reserve(rank, size, count)

    def begin(self, attempt: Attempt) -> None:
        """See :meth:`Transport.begin`."""
        with self._lock:
            self._guard.begin(attempt)
            self._engine.begin(attempt.epoch << 32 | attempt.number)
            held = list(self._guard.held)
        for pending in held:
            assert isinstance(pending, EnginePending), "every pending of this transport is one"
            self._release(pending)

    @property
    def dropped(self) -> int:
        """See :meth:`Transport.dropped`."""
        return sum(counters["dropped"] for *_, counters in self.statistics())

    def clock_of(self, rank: int) -> float:
        """See :meth:`Transport.clock_of`."""
        return self.clock_offsets[rank].ahead

    def abort(self, error: Exception) -> None:
        """See :meth:`Transport.abort`. Also ends the connections, so the ranks at their other ends notice."""
        self._guard.end(error)
        self._engine.close(str(error), 0.0)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._guard.finish_sends(_CLOSE_SECONDS)
        reason = TransportError(f"the transport of rank {self.rank} is closed")
        self._guard.end(reason)
        self._engine.close(str(reason), _LINGER_SECONDS)
        self._refusals.close()
        # Views of the engine's memory: torch can't release them any more once the interpreter ends.
        with self._lock:
            self._sent.clear()
            self._messages.clear()
        if self._on_close is not None:
            self._on_close()

    def statistics(self) -> list[tuple[int, int, ChannelClass, bool, dict[str, int]]]:
        """Return for each channel its source and destination rank, its class, whether it sends here, and its counters.

        Counters are those of ``csrc/delegate/channel/stats.h``; reading them delays no message.
        """
        return [
            (source, destination, ChannelClass(channel), is_sender, counters)
            for source, destination, channel, is_sender, counters in self._engine.statistics()
        ]

    def path_counts(self) -> tuple[PathCounts, ...]:
        """See :meth:`Transport.path_counts`."""
        return tuple(
            PathCounts(source, destination, channel, counters["path_failures"], counters["path_changes"])
            for source, destination, channel, _, counters in self.statistics()
        )

    def settle(self, pending: EnginePending) -> None:
        """Complete the pending of a message that the engine is done with, or fail it and all others."""
        request = pending.request
        assert request is not None and request.done, "the engine is done with it"
        if pending.attempt < self._guard.attempt:
            return
        try:
            tensors, sent_at = self._taken(pending, request)
        except TransportError as error:
            # Later messages would not match their receives either. The connections stay open: this rank is about to report the
            # cause, and a peer whose connection closed would report less.
            self._guard.fail(pending, error)
        else:
            pending.complete(tensors, sent_at, request.moment)
            self._guard.settle(pending)

    def _taken(self, pending: EnginePending, request: _C.Request) -> tuple[tuple[Tensor, ...], float]:
        identity = pending.identity
        source = pending.source_rank
        if (reason := request.error) is not None:
            raise peer_lost(pending.peer, identity, reason)
        if source is None:
            return (), 0.0
        if (other := request.other) is not None:
            Header(identity.specs).check(other.ljust(HEADER_BYTES, b"\0"), identity)
            raise TransportError(f"receive of {identity}: got a message of another size under the same header")
        memory = request.memory
        assert memory is not None, "an arrived message lies somewhere"
        message = self._messages.at(memory, identity.specs)
        sent_at = message.rule.check(message.header, identity) - self.clock_offsets[source].ahead
        if pending.into is None:
            return self._deliver(pending, message), sent_at
        pending.into.copy_(message.views[0])
        with self._lock:  # else the begin of a later attempt has released it
            if pending.attempt == self._guard.attempt:
                self._release(pending)
        return (pending.into,), sent_at

    # The GPU transport overrides the following methods.

    def _arriving_by(self, identity: Identity) -> EnginePending:
        """Return the receive of a message."""
        return EnginePending(identity)

    def _fill(self, message: EngineMessage, tensors: Sequence[Tensor], start: Callable[[float], None]) -> None:
        """Copy the tensors of a message into its memory, then ``start`` it with the time at which they were there."""
        there_at = now()
        copy_into(message.views, tensors)
        start(there_at)

    def _expect(self, pending: EnginePending, source_rank: int) -> None:
        """Prepare for the arrival of a message whose receive was posted."""

    def _deliver(self, pending: EnginePending, message: EngineMessage) -> tuple[Tensor, ...]:
        """Return the tensors of a message that arrived."""
        return tuple(view.detach().to(spec.dtype) for view, spec in zip(message.views, message.specs, strict=True))

    def _give_back(self, pending: EnginePending) -> None:
        """Let the engine fill the slot of a message that is no longer needed."""
        if pending.request is not None:
            self._engine.release(pending.request)

    def _make_room(self, specs: MessageSpec) -> Room | None:
        """Make the memory of a device for a received message; None where it stays in the engine's."""
        return None

    def _make_message(self, memory: _C.Memory, specs: MessageSpec) -> EngineMessage:
        return EngineMessage(memory, specs)

    def _start(self, pending: EnginePending, destination_rank: int, message: EngineMessage, posted_at: float) -> None:
        # Messages of one channel are matched by their order, so the queue's order has to be the engine's.
        with self._lock:
            if pending.attempt < self._guard.attempt:
                return  # another thread has begun a later attempt, which fails this send
            memory = message.memory
            message.rule.pack_into(message.header, pending.identity, pending.attempt, posted_at)
            request = self._engine.send(destination_rank, pending.identity.channel, memory, len(memory), posted_at)
            self._sent.append(pending)
        pending.begin(self.settle, request)

    def _sweep(self) -> None:
        """Recycle the memory of messages that were sent, because no thread waits for a send."""
        self._refusals.look(now())
        finished: list[EnginePending] = []
        with self._lock:
            while self._sent and self._sent[0].done:
                finished.append(self._sent.popleft())
        for pending in finished:
            self.settle(pending)
            if pending.request is not None and pending.request.error is None and pending.message is not None:
                self._messages.recycle(pending.message)
            pending.message = None
