"""Messages over torch.distributed's gloo. Those of a GPU go by way of the host.

Each class of channels has a communicator of its own, whatever backend the job's default group has. A message is one operation,
or two if it is large, see :mod:`adaptra.runtime.transports.message_format`. The second part's tag is made of its layout,
because gloo ends a process that receives more than it expects.

A thread per incoming channel waits for messages, so that the arrival time is exact, whatever the rank computes then. A thread
per outgoing channel keeps the buffers of messages until they are sent.

One lost rank ends the job's step, so the first failure of a channel fails all operations of this rank's transport.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Work

from adaptra.errors import TransportError
from adaptra.graph.ops.specs import MessageSpec
from adaptra.program.transport_contract import Contract
from adaptra.runtime.transports.base import (
    ChannelClass,
    Identity,
    LaneTraffic,
    MessageLayout,
    Pending,
    check_tensors,
    layout_of,
    now,
)
from adaptra.runtime.transports.c10d.communicators import Communicators
from adaptra.runtime.transports.c10d.device_copies import DeviceCopies
from adaptra.runtime.transports.c10d.preposted import FIRST_TAG, PrepostedReceives
from adaptra.runtime.transports.message_format import HEADER_BYTES, MessageBuffer, arrival
from adaptra.runtime.transports.pending import Completion, GuardedTransport, PendingOperations, peer_lost
from adaptra.runtime.transports.pool import Pool
from adaptra.runtime.transports.process_groups import Members
from adaptra.runtime.world.world import Attempt

logger = logging.getLogger(__name__)

CONTRACT: Final = Contract(send_waits_for_receiver=True, in_order=False)
_CLOSE_SECONDS: Final = 5.0


class _ChannelEnd(NamedTuple):
    peer: int
    channel: ChannelClass
    is_receive: bool


class _ServedChannel(NamedTuple):
    posted: queue.SimpleQueue[_Posted | None]
    thread: threading.Thread


class _Posted(NamedTuple):
    pending: Completion
    buffer: MessageBuffer | None
    works: tuple[Work, ...] = ()
    asked_at: float = -math.inf
    into: Tensor | None = None


class C10dTransport(GuardedTransport):
    """One rank's end of torch.distributed.

    All members create it at the same time; creating it makes communicators and compares clocks.

    Args:
        members: Those to join. None for all ranks of the default group, which is set up from the launcher's environment if it
            does not exist.
        device: The device of sent and received tensors.

    Attributes:
        clock_offsets: For every rank, how far its clock is ahead of this one's, with the uncertainty; seconds.

    Raises:
        LaunchError: There is no group and no launcher.
    """

    contract = CONTRACT

    def __init__(self, members: Members | None = None, device: torch.device | str = "cpu") -> None:
        self._communicators = Communicators(members)
        self.rank = self._communicators.rank
        self.world_size = self._communicators.size
        self._guard = PendingOperations(self.rank, self.world_size)
        self._copies = DeviceCopies(torch.device(device), f"adaptra rank {self.rank}")
        self._pool = Pool(self._copies.allocate_received)
        self._standing: dict[_ChannelEnd, PrepostedReceives] = {}
        self._held: dict[Pending, tuple[_ChannelEnd, MessageBuffer]] = {}
        self._sent: dict[MessageLayout, list[MessageBuffer]] = {}
        self._lock = threading.Lock()
        self._channels: dict[_ChannelEnd, _ServedChannel] = {}
        self._is_closed = self._waits_ended = False
        self.store = self._communicators.control_plane()
        self.clock_offsets = self._communicators.compare_clocks(self.store)

    def send(
        self, destination_rank: int, identity: Identity, tensors: Sequence[Tensor], *, posted_at: float | None = None
    ) -> Pending:
        """See :meth:`Transport.send`."""
        if posted_at is None and self._copies.device.type == "cpu":
            posted_at = now()
        check_tensors(identity, tensors)
        pending = self._guard.post(destination_rank, identity, is_receive=False)
        channel = _ChannelEnd(destination_rank, identity.channel, False)
        # Parts of sums are in host memory, and are not written to before they are sent.
        is_of_sum = channel.channel is ChannelClass.SUMS
        buffer = MessageBuffer(identity.specs, where=tensors[0]) if is_of_sum else self._buffer_of(identity)

        def post() -> _Posted:
            buffer.seal(identity, pending.attempt, posted_at)
            parts = ((buffer.first, FIRST_TAG), *(() if buffer.rest is None else ((buffer.rest, buffer.tag),)))
            works = tuple(self._communicators.send(memory, *channel[:2], tag) for memory, tag in parts)
            return _Posted(pending, buffer, works)

        def start() -> None:
            self._start(channel, pending, post)

        if not is_of_sum:
            self._copies.fill(buffer, tensors, start)
            return pending
        if buffer.is_own:
            buffer.fill(tensors)
        start()
        return pending

    def _buffer_of(self, identity: Identity) -> MessageBuffer:
        free = self._sent.setdefault(layout_of(identity.specs), [])
        try:
            return free.pop()
        except IndexError:
            return self._copies.allocate(identity.specs)

    def receive(self, source_rank: int, identity: Identity, into: Tensor | None = None) -> Pending:
        """See :meth:`Transport.receive`."""
        pending = self._guard.post(source_rank, identity, is_receive=True)
        channel = _ChannelEnd(source_rank, identity.channel, True)
        asked_at = now()

        def post() -> _Posted:
            buffer = self._standing_on(channel).ask(identity, into)
            if buffer is not None and into is None:
                self._held[pending] = (channel, buffer)
            return _Posted(pending, buffer, asked_at=asked_at, into=into)

        self._start(channel, pending, post)
        return pending

    def release(self, pending: Pending) -> None:
        """See :meth:`Transport.release`."""
        held = self._held.pop(pending, None)
        if held is None:
            assert isinstance(pending, Completion) and pending.attempt < self._guard.attempt, "it is released once"
            return
        channel, buffer = held
        self._give(channel, pending, buffer)
        if channel in self._standing:
            self._stand(channel, PrepostedReceives.top_up)

    def stand_by(self, source_rank: int, like: Identity, count: int) -> None:
        """See :meth:`Transport.stand_by`."""
        self._stand(_ChannelEnd(source_rank, like.channel, True), lambda standing: standing.stand(like, count))

    def reserve(self, counts: Mapping[tuple[int, MessageSpec], int]) -> None:
        """See :meth:`Transport.reserve`."""
        self._pool.reserve(counts)

    def prepare(self, traffic: LaneTraffic) -> None:
        """See :meth:`Transport.prepare`. Allocates the memory of sent messages, and compiles what packs them."""
        for specs, count in traffic.sent.items():
            free = self._sent.setdefault(layout_of(specs), [])
            free.extend(self._copies.allocate(specs) for _ in range(count - len(free)))
            self._copies.compile_for(specs)

    def begin(self, attempt: Attempt) -> None:
        """See :meth:`Transport.begin`."""
        with self._lock:
            self._guard.begin(attempt)
            for standing in self._standing.values():
                standing.begin()
            held, self._held = self._held, {}
        for pending, (channel, buffer) in held.items():
            self._give(channel, pending, buffer)

    def _give(self, channel: _ChannelEnd, pending: Pending, buffer: MessageBuffer) -> None:
        self._copies.leave(buffer)
        self._pool.give(channel.peer, pending.identity, buffer)

    @property
    def dropped(self) -> int:
        """See :meth:`Transport.dropped`."""
        return self._guard.dropped

    def clock_of(self, rank: int) -> float:
        """See :meth:`Transport.clock_of`."""
        return self.clock_offsets[rank].ahead

    def abort(self, error: Exception) -> None:
        """See :meth:`Transport.abort`. Also closes the connections, so the ranks at their other ends notice."""
        self._guard.end(error)
        self._end_waits()

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._guard.finish_sends(_CLOSE_SECONDS)
        # Messages of an earlier attempt may still be under way.
        unfinished = self._guard.has_pending() or self._guard.attempt.number > 0
        is_whole = self._guard.end(TransportError(f"the transport of rank {self.rank} is closed"))
        if unfinished or not is_whole:
            self._end_waits()
        threads = [channel.thread for channel in self._channels.values()]
        for channel in self._channels.values():
            channel.posted.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_SECONDS)
                if thread.is_alive():
                    logger.warning("rank %d: %s still waits for its last message", self.rank, thread.name)
        self._copies.close()
        self._standing.clear()
        is_idle = is_whole and not unfinished and not any(thread.is_alive() for thread in threads)
        self._communicators.close(is_idle, self.store)

    def _start(self, channel: _ChannelEnd, pending: Completion, post: Callable[[], _Posted]) -> None:
        try:
            # One message at a time, so that no other thread's message comes between its parts.
            with self._lock:
                if pending.attempt < self._guard.attempt:
                    return  # another thread has begun a later attempt, which fails this operation
                if channel not in self._channels:
                    self._open(channel)
                self._channels[channel].posted.put(post())
        except RuntimeError as error:
            self._guard.fail(pending, peer_lost(channel.peer, pending.identity, str(error)))
            if not pending.identity.may_be_lost:
                pending.wait()

    def _stand(self, channel: _ChannelEnd, change: Callable[[PrepostedReceives], None]) -> None:
        # A lost peer is reported when a message of it is wanted.
        with self._lock, contextlib.suppress(RuntimeError):
            change(self._standing_on(channel))

    def _standing_on(self, channel: _ChannelEnd) -> PrepostedReceives:
        if channel not in self._standing:
            self._standing[channel] = PrepostedReceives(
                lambda memory, tag: self._communicators.receive(memory, *channel[:2], tag), self._pool, channel.peer
            )
        return self._standing[channel]

    def _open(self, channel: _ChannelEnd) -> None:
        posted: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        way = "from" if channel.is_receive else "to"
        name = f"adaptra rank {self.rank} {channel.channel.name.lower()} {way} {channel.peer}"
        thread = threading.Thread(target=self._serve, args=(channel, posted), name=name, daemon=True)
        self._channels[channel] = _ServedChannel(posted, thread)
        thread.start()

    def _serve(self, channel: _ChannelEnd, queued: queue.SimpleQueue[_Posted | None]) -> None:
        """Wait for the messages of one channel, one after the other."""
        if self._copies.device.type == "cuda":
            torch.cuda.set_device(self._copies.device)  # each thread has a current device of its own
        while (posted := queued.get()) is not None:
            try:
                if channel.is_receive:
                    self._await_message(channel, posted)
                    continue
                for work in posted.works:
                    work.wait()
            except TransportError as error:
                # Later messages would not match their receives either. The connections stay open: this rank is about to report
                # the cause, and a peer whose connection closed would blame this rank.
                self._guard.fail(posted.pending, error)
                continue
            except RuntimeError as error:
                self._guard.fail(posted.pending, peer_lost(channel.peer, posted.pending.identity, str(error)))
                continue
            posted.pending.complete()
            assert posted.buffer is not None, "a sent message lies in one"
            if channel.channel is not ChannelClass.SUMS:
                self._sent[layout_of(posted.pending.identity.specs)].append(posted.buffer)
            self._guard.settle(posted.pending)

    def _await_message(self, channel: _ChannelEnd, posted: _Posted) -> None:
        """Deliver the next message of the receive's attempt to it, and drop those of earlier ones. Waits for them."""
        pending = posted.pending
        while pending.attempt == self._guard.attempt:
            with self._lock:
                standing = self._standing[channel]
                work, landing = standing.oldest()
            if work is not None:
                work.wait()
                with self._lock:
                    standing.arrived()
            header = arrival(landing[:HEADER_BYTES].numpy().tobytes())
            if header is not None and header.attempt > pending.attempt:
                with contextlib.suppress(Exception):
                    pending.wait()  # fails once this rank begins that attempt too, whose first receive gets the message
                return
            with self._lock:
                if pending.attempt < self._guard.attempt:
                    return
                if header is None or header.attempt == pending.attempt:
                    buffer, second = standing.take(pending.identity, posted.buffer)
                    if posted.into is None:
                        self._held[pending] = (channel, buffer)
                    break
                dropped = standing.drop(header)
            self._guard.drop()
            if dropped is not None:
                dropped.work.wait()
                with self._lock:
                    dropped.end()
        else:
            return
        sent_at = buffer.check(pending.identity) - self.clock_offsets[channel.peer].ahead
        if second is not None:
            second.wait()
        arrived_at = now()
        if posted.into is not None and buffer.is_own:
            posted.into.copy_(buffer.views[0])
        tensors = self._copies.tensors_of(pending, buffer) if posted.into is None else (posted.into,)
        pending.complete(tensors, sent_at, arrived_at, asked_at=posted.asked_at)
        self._guard.settle(pending)

    def _end_waits(self) -> None:
        with self._lock:
            has_ended, self._waits_ended = self._waits_ended, True
        if not has_ended:
            self._communicators.end_waits()
