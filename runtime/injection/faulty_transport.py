"""Fault injection for messages: a transport whose links turn slow, or are cut for a while, as configured.

Each affected message is delayed at its sender, several at a time as on a real link, and the sending rank itself never waits. As
in :class:`adaptra.simulation.cost.CostModel`, messages queue for each other's occupancy (bytes / rate), never for their
latency.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaptra.errors import TransportError
from adaptra.graph.ops.specs import MessageSpec
from adaptra.program import Program
from adaptra.runtime.injection.faults import Effect, Fault, link_delay, link_occupancy
from adaptra.runtime.transports.base import ChannelClass, Identity, LaneTraffic, PathCounts, Pending, Transport, now
from adaptra.runtime.transports.pending import wait_for
from adaptra.runtime.world.world import Attempt


class _HeldSend(Pending):
    """A send that is delayed first and then becomes its transport's own."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.sent_at = 0.0
        self.departed_at = 0.0
        self.arrived_at = 0.0
        self._handed = threading.Event()
        self._inner: Pending | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """True if :meth:`wait` returns or raises at once."""
        return self._handed.is_set() and (self._inner is None or self._inner.done)

    def hand(self, inner: Pending) -> None:
        """Continue with the transport's own send, because the delay is over."""
        self._inner = inner
        self._handed.set()

    def fail(self, error: Exception) -> None:
        """Fail the send, because the message will never leave."""
        self._error = error
        self._handed.set()

    def wait(self, timeout: float | None = None) -> tuple[Tensor, ...]:
        """See :meth:`Pending.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not wait_for(self._handed, timeout):
            raise TransportError(f"{self.identity}: held by a fault for more than {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._inner is not None
        return self._inner.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


class _CutReceive(Pending):
    """A receive whose message comes no earlier than a cut ends."""

    def __init__(self, inner: Pending, transport: FaultyTransport) -> None:
        self.identity = inner.identity
        self.inner = inner
        self._transport = transport

    @property
    def done(self) -> bool:
        """True if :meth:`wait` returns or raises at once."""
        return self.inner.done and not self._transport.is_cut_at(self.inner.arrived_at)

    def wait(self, timeout: float | None = None) -> tuple[Tensor, ...]:
        """See :meth:`Pending.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        tensors = self.inner.wait(timeout)
        if self._transport.is_cut_at(self.inner.arrived_at):
            self._transport.await_end_of_cut(self.identity, deadline)
        self.sent_at, self.departed_at = self.inner.sent_at, self.inner.departed_at
        self.arrived_at = self._transport.after_cut(self.inner.arrived_at)
        return tensors


@dataclass(order=True, slots=True)
class _Held:
    """A delayed message and its due time."""

    due: float
    ordinal: int
    destination_rank: int = field(compare=False)
    tensors: Sequence[Tensor] = field(compare=False)
    posted_at: float = field(compare=False)
    pending: _HeldSend = field(compare=False)


@dataclass(slots=True)
class _Queue:
    """A channel to a rank: when its last delayed message is due, and how many are held."""

    last_due: float = 0.0
    held: int = 0


class FaultyTransport(Transport):
    """Any transport, with faults on its edges.

    A delayed message keeps its order on its channel and its posting time. So the receiver measures the fault in the same way as
    a slow link. Tensors must not be written to while they are delayed.

    Args:
        transport: Carries the messages.
        faults: The rank's own faults, see :func:`.faults.faults_of_worker`. Those of stages and workers change nothing here:
            :class:`.emulation.Pacing` applies them.
    """

    def __init__(self, transport: Transport, faults: Iterable[Fault]) -> None:
        self.contract = transport.contract
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.store = transport.store
        self.faults = tuple(faults)
        self._transport = transport
        self._condition = threading.Condition()
        self._held: list[_Held] = []
        self._ordinal = 0
        self._edge_free: dict[tuple[int, int], float] = {}
        self._channels: defaultdict[tuple[int, ChannelClass], _Queue] = defaultdict(_Queue)
        self._error: Exception | None = None
        self._ends = False
        self._cut = (0.0, 0.0)
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        name = f"adaptra rank {self.rank} faults"
        self._thread = threading.Thread(target=self._release_in_time, args=(device,), name=name, daemon=True)
        self._thread.start()

    def send(
        self, destination_rank: int, identity: Identity, tensors: Sequence[Tensor], *, posted_at: float | None = None
    ) -> Pending:
        """See :meth:`Transport.send`."""
        posted_at = now() if posted_at is None else posted_at
        delay, occupancy = link_delay(self.faults, identity), link_occupancy(self.faults, identity)
        with self._condition:
            channel = self._channels[destination_rank, identity.channel]
            if self._error is not None:
                raise self._error
            if not delay and not occupancy and not channel.held and self._cut[1] <= now():
                return self._transport.send(destination_rank, identity, tensors, posted_at=posted_at)
            departed = posted_at
            if occupancy:
                departed = max(posted_at, self._edge_free.get(identity.edge, 0.0)) + occupancy
                self._edge_free[identity.edge] = departed
            channel.last_due = due = max(departed + delay, channel.last_due)
            channel.held += 1
            self._ordinal += 1
            pending = _HeldSend(identity)
            heapq.heappush(self._held, _Held(due, self._ordinal, destination_rank, tuple(tensors), posted_at, pending))
            self._condition.notify_all()
        return pending

    def cut(self, seconds: float) -> None:
        """Let no message leave or come for some seconds. They are held, and go on their way afterwards."""
        with self._condition:
            self._cut = now(), now() + seconds

    def is_cut_at(self, instant: float) -> bool:
        """Return whether what arrived at a time is held, as a cut has not ended."""
        begin, end = self._cut
        return begin <= instant and now() < end

    def after_cut(self, instant: float) -> float:
        """Return when that came which arrived at a time."""
        begin, end = self._cut
        return max(instant, end) if begin <= instant else instant

    def await_end_of_cut(self, identity: Identity, deadline: float | None) -> None:
        """Wait until the cut has ended.

        Raises:
            TransportError: It has not ended by then.
            Exception: The error that has ended the transport meanwhile.
        """
        with self._condition:
            while self._error is None and (left := self._cut[1] - now()) > 0:
                if deadline is not None and deadline <= now():
                    raise TransportError(f"{identity}: held by a fault that cuts rank {self.rank} off")
                self._condition.wait(left if deadline is None else min(left, deadline - now()))
            if self._error is not None:
                raise self._error

    @property
    def attempt(self) -> Attempt:
        """See :meth:`Transport.attempt`."""
        return self._transport.attempt

    def begin(self, attempt: Attempt) -> None:
        """See :meth:`Transport.begin`. Delayed messages are dropped."""
        with self._condition:
            self._transport.begin(attempt)
            held, self._held = self._held, []
            for channel in self._channels.values():
                channel.held = 0
        for each in held:
            each.pending.fail(TransportError(f"{each.pending.identity}: held by a fault until {attempt} began"))

    @property
    def dropped(self) -> int:
        """See :meth:`Transport.dropped`."""
        return self._transport.dropped

    def receive(self, source_rank: int, identity: Identity, into: Tensor | None = None) -> Pending:
        """See :meth:`Transport.receive`."""
        receive = self._transport.receive(source_rank, identity, into)
        return _CutReceive(receive, self) if any(one.effect is Effect.CUT for one in self.faults) else receive

    def release(self, pending: Pending) -> None:
        """See :meth:`Transport.release`."""
        self._transport.release(pending.inner if isinstance(pending, _CutReceive) else pending)

    def reserve(self, counts: Mapping[tuple[int, MessageSpec], int]) -> None:
        """See :meth:`Transport.reserve`."""
        self._transport.reserve(counts)

    def prepare(self, traffic: LaneTraffic) -> None:
        """See :meth:`Transport.prepare`."""
        self._transport.prepare(traffic)

    def stand_by(self, source_rank: int, like: Identity, count: int) -> None:
        """See :meth:`Transport.stand_by`."""
        self._transport.stand_by(source_rank, like, count)

    def use_lanes(self, step: int, program: Program) -> None:
        """See :meth:`Transport.use_lanes`."""
        self._transport.use_lanes(step, program)

    def clock_of(self, rank: int) -> float:
        """See :meth:`Transport.clock_of`."""
        return self._transport.clock_of(rank)

    def waiting_for(self, rank: int) -> Identity | None:
        """See :meth:`Transport.waiting_for`."""
        return self._transport.waiting_for(rank)

    def path_counts(self) -> tuple[PathCounts, ...]:
        """See :meth:`Transport.path_counts`."""
        return self._transport.path_counts()

    def abort(self, error: Exception) -> None:
        """See :meth:`Transport.abort`. Delayed messages are dropped."""
        self._drop(error)
        self._transport.abort(error)

    def close(self) -> None:
        """See :meth:`Transport.close`. Delayed messages are sent first, each at its time."""
        with self._condition:
            self._ends = True
            self._condition.notify_all()
        self._thread.join()
        self._drop(TransportError(f"the transport of rank {self.rank} is closed"))
        self._transport.close()

    def _drop(self, error: Exception) -> None:
        with self._condition:
            if self._error is None:
                self._error = error
            held, self._held = self._held, []
            self._condition.notify_all()
        for each in held:
            each.pending.fail(error)

    def _release_in_time(self, device: int | None) -> None:
        if device is not None:  # each thread has a current device of its own
            torch.cuda.set_device(device)
        while True:
            with self._condition:
                while self._held and (left := max(self._held[0].due, self._cut[1]) - now()) > 0:
                    self._condition.wait(left)
                if not self._held:
                    if self._ends or self._error is not None:
                        return
                    self._condition.wait()
                    continue
                # Sent under the lock, so that no later message of its channel overtakes it.
                held = heapq.heappop(self._held)
                identity = held.pending.identity
                try:
                    inner = self._transport.send(held.destination_rank, identity, held.tensors, posted_at=held.posted_at)
                except Exception as error:
                    held.pending.fail(error)
                else:
                    held.pending.hand(inner)
                self._channels[held.destination_rank, identity.channel].held -= 1
