"""Messages between threads of one process, passed by reference.

Ranks are threads. A message arrives the moment it is sent. Nothing is copied, so both sides must leave the tensors unchanged.
A tensor on another GPU than the receiver's is copied to that one, on streams of the copies' own, for which no host waits. The
receiver's GPU is the current device of the thread that posts the receive.
Messages are matched by identity in any order. A :class:`LocalHub` joins the ranks and makes one transport for each.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, distributed

from adaptra.errors import LaunchError, TransportError
from adaptra.graph.ops.specs import MessageSpec
from adaptra.program.transport_contract import Contract
from adaptra.runtime.transports.base import ChannelClass, Identity, Pending, check_tensors, describe_layout, layout_of, now
from adaptra.runtime.transports.peer_copies import PeerCopies
from adaptra.runtime.transports.pending import Completion, GuardedTransport, PendingOperations
from adaptra.runtime.transports.pool import Pool
from adaptra.runtime.world.world import Attempt

CONTRACT: Final = Contract(send_waits_for_receiver=False, in_order=False)
"""A message leaves at once and in no queue, but the receiver reads the sender's own tensors."""

_Address = tuple[int, int, tuple[object, ...]]


class _LocalMessage:
    """A message under way: its tensors, the events after which they are there, and its times of posting and arrival."""

    __slots__ = ("arrived_at", "attempt", "identity", "ready", "sent_at", "tensors")

    def __init__(self, identity: Identity, attempt: Attempt, tensors: tuple[Tensor, ...], sent_at: float) -> None:
        self.identity = identity
        self.attempt = attempt
        self.tensors = tensors
        self.sent_at = sent_at
        self.arrived_at = now()
        self.ready = {
            device: torch.cuda.current_stream(device).record_event()
            for device in {one.device for one in tensors if one.is_cuda}
        }


class _LocalReceive(Completion):
    """A receive, with the GPU that it takes tensors of GPUs to; None for those that the host reads."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity)
        has_gpu = torch.cuda.is_initialized() and not identity.is_for_host
        self.device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else None
        self.into: Tensor | None = None


class LocalHub:
    """The network of ``world_size`` ranks in one process.

    Args:
        world_size: The number of ranks.

    Raises:
        LaunchError: There is no rank, or this torch was built without torch.distributed, whose in-memory store is used.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise LaunchError(f"world_size={world_size}: expected at least one rank")
        if not distributed.is_available():
            raise LaunchError("the local transport needs torch.distributed, and this torch was built without it")
        self.world_size = world_size
        self.store = distributed.HashStore()
        self._lock = threading.Lock()
        self._arrived: dict[_Address, _LocalMessage] = {}
        self._posted: dict[_Address, tuple[LocalTransport, _LocalReceive]] = {}
        self._attempts = [Attempt()] * world_size
        self._dropped = [0] * world_size

    def transport(self, rank: int) -> LocalTransport:
        """Return the transport of one rank; each rank asks once.

        Raises:
            LaunchError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise LaunchError(f"rank {rank}: expected a rank of 0..{self.world_size - 1}")
        return LocalTransport(self, rank)

    def begin(self, rank: int, attempt: Attempt) -> None:
        """Drop what came to a rank in earlier attempts than this one, now and later, and forget its receives."""
        with self._lock:
            self._attempts[rank] = attempt
            late = [one for one, message in self._arrived.items() if one[1] == rank and message.attempt < attempt]
            for address in late:
                del self._arrived[address]
            self._dropped[rank] += len(late)
            self._posted = {one: posted for one, posted in self._posted.items() if one[1] != rank}

    def dropped(self, rank: int) -> int:
        """Return the number of messages of earlier attempts that came to a rank."""
        return self._dropped[rank]

    def deliver(self, source: int, destination: int, message: _LocalMessage) -> None:
        """Pass a message to the receive that waits for it, or keep it for a later receive."""
        address = (source, destination, (message.attempt, *message.identity.key))
        with self._lock:
            if message.attempt < self._attempts[destination]:
                self._dropped[destination] += 1
                return
            posted = self._posted.pop(address, None)
            if posted is None:
                if address in self._arrived:
                    raise TransportError(f"send of {message.identity}: this message was sent before")
                self._arrived[address] = message
        if posted is not None:
            posted[0].arrive(posted[1], message)

    def expect(self, source: int, transport: LocalTransport, pending: _LocalReceive) -> None:
        """Complete a receive with a message that came before it, or keep it for a later message."""
        address = (source, transport.rank, (pending.attempt, *pending.identity.key))
        with self._lock:
            if pending.attempt < self._attempts[transport.rank]:
                return  # another thread has begun a later attempt, which fails this receive
            message = self._arrived.pop(address, None)
            if message is None:
                if address in self._posted:
                    raise TransportError(f"receive of {pending.identity}: this receive was posted before")
                self._posted[address] = (transport, pending)
        if message is not None:
            transport.arrive(pending, message)


class LocalTransport(GuardedTransport):
    """One thread's end of a :class:`LocalHub`."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self.contract = CONTRACT
        self.rank = rank
        self.world_size = hub.world_size
        self.store = hub.store
        self._hub = hub
        self._guard = PendingOperations(rank, hub.world_size)
        # This pool has no memory, it only counts, so that a program that exceeds its reservation fails on every transport.
        self._pool: Pool[None] = Pool(lambda _: None)
        self._held: dict[Pending, int] = {}
        self._copies = PeerCopies()

    def send(
        self, destination_rank: int, identity: Identity, tensors: Sequence[Tensor], *, posted_at: float | None = None
    ) -> Pending:
        """See :meth:`Transport.send`."""
        check_tensors(identity, tensors)
        pending = self._guard.post(destination_rank, identity, is_receive=False)
        sent = tuple(spec.arriving(tensor) for tensor, spec in zip(tensors, identity.specs, strict=True))
        if identity.channel is ChannelClass.SUMS:
            sent = tuple(one.clone() for one in sent)  # the result is written over the term once that is sent
        message = _LocalMessage(identity, pending.attempt, sent, now() if posted_at is None else posted_at)
        self._hub.deliver(self.rank, destination_rank, message)
        pending.complete()
        self._guard.settle(pending)
        return pending

    def receive(self, source_rank: int, identity: Identity, into: Tensor | None = None) -> Pending:
        """See :meth:`Transport.receive`."""
        pending = self._guard.post(source_rank, identity, is_receive=True, make=_LocalReceive)
        pending.into = into
        if into is None:
            self._pool.take(source_rank, identity)
            self._held[pending] = source_rank
        self._hub.expect(source_rank, self, pending)
        return pending

    def begin(self, attempt: Attempt) -> None:
        """See :meth:`Transport.begin`."""
        self._guard.begin(attempt)
        self._hub.begin(self.rank, attempt)
        for pending in list(self._held):
            self.release(pending)

    @property
    def dropped(self) -> int:
        """See :meth:`Transport.dropped`."""
        return self._hub.dropped(self.rank)

    def arrive(self, pending: _LocalReceive, message: _LocalMessage) -> None:
        """Complete ``pending`` with its message, which has arrived."""
        expected, sent = layout_of(pending.identity.specs), layout_of(message.identity.specs)
        if sent == expected:
            # Detached, so that one side's autograd never reaches the other's tensor.
            tensors = tuple(tensor.detach() for tensor in message.tensors)
            if pending.into is not None:
                tensors = (pending.into.copy_(tensors[0]),)
            elif pending.device is not None and any(device != pending.device for device in message.ready):
                tensors, pending.use = self._copies.to(pending.device, tensors, message.ready, pending.identity.channel)
            pending.complete(tensors, message.sent_at, message.arrived_at)
        else:
            pending.fail(TransportError(f"receive of {pending.identity}: got {describe_layout(sent)}"))
        self._guard.settle(pending)

    def release(self, pending: Pending) -> None:
        """See :meth:`Transport.release`."""
        self._pool.give(self._held.pop(pending), pending.identity, None)

    def reserve(self, counts: Mapping[tuple[int, MessageSpec], int]) -> None:
        """See :meth:`Transport.reserve`."""
        self._pool.reserve(counts)

    def abort(self, error: Exception) -> None:
        """See :meth:`Transport.abort`."""
        self._guard.end(error)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self._guard.end(TransportError(f"the transport of rank {self.rank} is closed"))
