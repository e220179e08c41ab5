"""Activations and their gradients over NCCL, each directed edge between neighbours by a communicator of its own.

A message is one operation: its header and its tensors lie in one buffer of the device. Operations of an edge go to a stream of
that edge, and threads of the edge wait for them. The executor's thread waits for none of the device's work. The stream that
uses a message waits for its event.

All other messages travel beside, on the transport that this one is joined with as a lane, see :mod:`.join`. So do messages
between ranks that are not neighbours.

A communicator can't tell messages of two attempts apart, so each attempt has communicators of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.distributed import Store

from adaptra.errors import TransportError
from adaptra.graph.ops.specs import MessageSpec
from adaptra.program.transport_contract import Contract
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.devices import pack
from adaptra.runtime.devices.events import recorded
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport, check_tensors, now
from adaptra.runtime.transports.nccl.device_message import DeviceMessage
from adaptra.runtime.transports.nccl.edge_end import EdgeEnd, EdgeMessage
from adaptra.runtime.transports.nccl.edges import Edge
from adaptra.runtime.transports.nccl.rank_edges import RankEdges
from adaptra.runtime.transports.pending import GuardedTransport, PendingOperations, peer_lost
from adaptra.runtime.transports.pool import Pool
from adaptra.runtime.transports.process_groups import Members
from adaptra.runtime.world.world import Attempt

logger = logging.getLogger(__name__)

# A kernel of the sender waits for the receiver's. Posted receives of a communicator are in line behind each other, so that one
# kernel at most waits for each edge.
CONTRACT: Final = Contract(send_waits_for_receiver=True, in_order=False)
_CLOSE_SECONDS: Final = 5.0


class _Slot:
    """The place of a message in the pool, which has memory from its first use on."""

    def __init__(self, specs: MessageSpec) -> None:
        self.specs = specs
        self.message: DeviceMessage | None = None


class NcclTransport(GuardedTransport):
    """One rank's end of all its edges. All members create it at the same time, and all communicators are made then.

    Args:
        beside: The transport of all other messages, whose ranks, control plane and clocks are this one's.
        members: This rank among all, under a name of this transport's.
        meeting: The keys under that name, over a client that nothing else uses.
        device: The GPU of this rank.
        edges: Those of all ranks, in the order in which communicators are made.
        on_close: Called once it is closed, and told whether nothing failed.

    Raises:
        Exception: A communicator could not be made.
    """

    contract = CONTRACT

    def __init__(
        self,
        beside: Transport,
        members: Members,
        meeting: Store,
        device: torch.device,
        edges: Sequence[Edge],
        on_close: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.rank, self.world_size, self.store = beside.rank, beside.world_size, beside.store
        self._beside = beside
        self._meeting: Final = members, meeting
        self._device = device
        self._edges = tuple(edge for edge in edges if self.rank in edge[:2])
        self._guard = PendingOperations(self.rank, self.world_size)
        self._pool = Pool(_Slot)
        self._held: dict[Pending, tuple[int, _Slot]] = {}
        self._lock = threading.Lock()
        self._on_close = on_close
        self._is_closed = False
        with torch.cuda.device(device):
            self._packs = pack.why_not(device) is None
        self._rank_edges = self._connect()
        try:
            self._rank_edges.wait()
        except Exception as error:
            self._rank_edges.end(error, is_idle=False)
            raise

    def carries(self, identity: Identity, source: int, destination: int) -> bool:
        """See :meth:`Transport.carries`."""
        is_exchanged = identity.purpose in (Purpose.ACTIVATION, Purpose.GRADIENT)
        return is_exchanged and Edge(source, destination, identity.channel) in self._edges

    def send(
        self, destination_rank: int, identity: Identity, tensors: Sequence[Tensor], *, posted_at: float | None = None
    ) -> Pending:
        """See :meth:`Transport.send`."""
        check_tensors(identity, tensors)
        pending = self._guard.post(destination_rank, identity, is_receive=False)
        with self._lock:
            if pending.attempt == self._guard.attempt:  # else another thread has begun a later one, which fails this operation
                end = self._rank_edges.ends[Edge(self.rank, destination_rank, identity.channel)]
                end.send(pending, tensors, posted_at)
        return pending

    def receive(self, source_rank: int, identity: Identity, into: Tensor | None = None) -> Pending:
        """See :meth:`Transport.receive`."""
        assert into is None, "messages to host memory travel beside"
        pending = self._guard.post(source_rank, identity, is_receive=True)
        with self._lock:
            if pending.attempt == self._guard.attempt:
                slot = self._pool.take(source_rank, identity)
                self._held[pending] = source_rank, slot
                end = self._rank_edges.ends[Edge(source_rank, self.rank, identity.channel)]
                slot.message = slot.message or end.allocate(identity.specs)
                end.post(EdgeMessage(pending, slot.message, None, now()))
        return pending

    def release(self, pending: Pending) -> None:
        """See :meth:`Transport.release`. The present stream is the last user of the message's tensors."""
        with self._lock:
            held = self._held.pop(pending, None)
        if held is None:
            return  # a later attempt has begun
        source_rank, slot = held
        assert slot.message is not None, "what was received lies in memory"
        slot.message.free_from = recorded(torch.cuda.current_stream(self._device))
        self._pool.give(source_rank, pending.identity, slot)

    def reserve(self, counts: Mapping[tuple[int, MessageSpec], int]) -> None:
        """See :meth:`Transport.reserve`. A message gets memory at its first use, since most travel beside."""
        self._pool.reserve(counts)

    def begin(self, attempt: Attempt) -> None:
        """See :meth:`Transport.begin`. Communicators of the attempt are made in the background.

        A world's first attempt begins before any message, and keeps the communicators that were just made.
        """
        with self._lock:
            self._guard.begin(attempt)
            if attempt.number == 0:
                return
            self._rank_edges = self._connect(self._rank_edges)
            held, self._held = self._held, {}
        for pending, (source_rank, slot) in held.items():
            # Operations of the attempt before may still write to their memory.
            self._pool.give(source_rank, pending.identity, _Slot(slot.specs))

    @property
    def dropped(self) -> int:
        """See :meth:`Transport.dropped`. What was sent in an earlier attempt never comes here."""
        return 0

    def clock_of(self, rank: int) -> float:
        """See :meth:`Transport.clock_of`."""
        return self._beside.clock_of(rank)

    def abort(self, error: Exception) -> None:
        """See :meth:`Transport.abort`. Also ends the communicators, so the ranks at their other ends notice."""
        self._guard.end(error)
        with self._lock:
            edges = self._rank_edges
        edges.end(error, is_idle=False)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._guard.finish_sends(_CLOSE_SECONDS)
        is_idle = not self._guard.has_pending()
        reason = TransportError(f"the transport of rank {self.rank} is closed")
        is_whole = self._guard.end(reason)
        self._rank_edges.end(reason, is_idle=is_idle and is_whole)
        self._rank_edges.join()
        self._on_close(is_idle and is_whole)

    def _connect(self, before: RankEdges | None = None) -> RankEdges:
        """Begin to make the communicators of the present attempt, which end those of the one before."""
        name = str(self._guard.attempt)
        ends = {
            edge: EdgeEnd(
                edge,
                edge.source == self.rank,
                self._device,
                f"adaptra rank {self.rank}",
                self._packs,
                self.clock_of(edge.source),
                self._ended,
            )
            for edge in self._edges
        }
        members, store = self._meeting
        return RankEdges(ends, members.part(name), under(name, store), self._device, self._unconnected, before)

    def _ended(self, edge: Edge, posted: EdgeMessage, error: Exception | None) -> None:
        """Forget a message that has ended, or fail it and with it all others. Called on the edge's threads."""
        pending = posted.pending
        if error is not None and pending.attempt == self._guard.attempt:
            (peer,) = {*edge[:2]} - {self.rank}
            if not isinstance(error, TransportError):
                error = peer_lost(peer, pending.identity, str(error))
            # The connections stay open: this rank is about to report the cause, and its peer would blame this rank.
            self._guard.end(error)
            pending.fail(error)
        self._guard.settle(pending)

    def _unconnected(self, error: Exception) -> None:
        self._guard.end(TransportError(f"rank {self.rank}: NCCL can't connect it in {self._guard.attempt}: {error}"))
