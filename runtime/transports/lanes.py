"""Several transports as one: most messages by the first, those of slow edges by another lane.

The program defines which edges take a lane: the pass ``lower-comm`` marks their SEND and RECV ops. A plan with other marks
takes effect at the same step on all ranks, and every message carries its step. So both ends of a message always agree on its
lane, even while messages of the previous step are still under way on another. No lane has to be drained, because a step ends on
a rank only when all messages that it receives in that step have arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from torch import Tensor

from adaptra.errors import TransportError
from adaptra.graph.ops.specs import MessageSpec
from adaptra.program import Kind, Program
from adaptra.program.dependencies import peer_stage
from adaptra.program.placement import Edge
from adaptra.runtime.transports.base import Identity, LaneTraffic, PathCounts, Pending, Purpose, Transport
from adaptra.runtime.world.world import Attempt


class LanedTransport(Transport):
    """One rank's end of several transports that join the same ranks.

    Every transport reserves buffers for all messages. Transports that make buffers on first use, as the delegate does, allocate
    them for their own lane only.

    Args:
        default: Carries messages without a lane; its contract, rank and store are this transport's.
        lanes: The other transports by the name of their lane.
        rest: The lane of messages that the default doesn't carry; None if it carries all.
    """

    def __init__(self, default: Transport, lanes: Mapping[str, Transport], rest: str | None = None) -> None:
        self.contract = default.contract
        self.rank = default.rank
        self.world_size = default.world_size
        self.store = default.store
        self.rdma_devices = tuple(name for each in (default, *lanes.values()) for name in each.rdma_devices)
        self._default = default
        self._lanes = dict(lanes)
        self._rest = default if rest is None else lanes[rest]
        self._all = (default, *self._lanes.values())
        self._lock = threading.Lock()
        self._lane_of: list[tuple[int, dict[Edge, str]]] = []
        self._carrier: dict[Pending, Transport] = {}

    @property
    def attempt(self) -> Attempt:
        """See :meth:`Transport.attempt`."""
        return self._default.attempt

    def begin(self, attempt: Attempt) -> None:
        """See :meth:`Transport.begin`."""
        self._carrier.clear()
        for transport in self._all:
            transport.begin(attempt)

    @property
    def dropped(self) -> int:
        """See :meth:`Transport.dropped`."""
        return sum(transport.dropped for transport in self._all)

    def use_lanes(self, step: int, program: Program) -> None:
        """See :meth:`Transport.use_lanes`."""
        lane_of: dict[Edge, str] = {}
        for order in program.orders:
            for op in order:
                if op.lane is None or op.kind.is_compute:
                    continue
                if op.lane not in self._lanes:
                    raise TransportError(f"{op}: expected one of the lanes {', '.join(sorted(self._lanes))}")
                is_send = op.kind in (Kind.SEND_F, Kind.SEND_B)
                lane_of[(op.stage, peer_stage(op)) if is_send else (peer_stage(op), op.stage)] = op.lane
        with self._lock:
            # A fault may delay a message of the previous step; older ones have arrived.
            self._lane_of = [*self._lane_of[-3:], (step, lane_of)]

    def lane_of(self, identity: Identity) -> str | None:
        """Return the lane of a message; None for messages of no program and for evaluations."""
        if identity.purpose not in (Purpose.ACTIVATION, Purpose.GRADIENT):
            return None
        with self._lock:
            tables = [lanes for step, lanes in self._lane_of if step <= identity.step]
        return tables[-1].get(identity.edge) if tables and identity.step >= 0 else None

    def send(
        self, destination_rank: int, identity: Identity, tensors: Sequence[Tensor], *, posted_at: float | None = None
    ) -> Pending:
        """See :meth:`Transport.send`."""
        carrier = self._carrier_of(identity, self.rank, destination_rank)
        return carrier.send(destination_rank, identity, tensors, posted_at=posted_at)

    def receive(self, source_rank: int, identity: Identity, into: Tensor | None = None) -> Pending:
        """See :meth:`Transport.receive`."""
        carrier = self._carrier_of(identity, source_rank, self.rank)
        pending = carrier.receive(source_rank, identity, into)
        if into is None:
            self._carrier[pending] = carrier
        return pending

    def release(self, pending: Pending) -> None:
        """See :meth:`Transport.release`."""
        self._carrier.pop(pending).release(pending)

    def reserve(self, counts: Mapping[tuple[int, MessageSpec], int]) -> None:
        """See :meth:`Transport.reserve`."""
        for transport in self._all:
            transport.reserve(counts)

    def prepare(self, traffic: LaneTraffic) -> None:
        """See :meth:`Transport.prepare`."""
        (self._default if traffic.lane is None else self._lanes[traffic.lane]).prepare(traffic)

    def clock_of(self, rank: int) -> float:
        """See :meth:`Transport.clock_of`."""
        return self._default.clock_of(rank)

    def stand_by(self, source_rank: int, like: Identity, count: int) -> None:
        """See :meth:`Transport.stand_by`."""
        self._carrier_of(like, source_rank, self.rank).stand_by(source_rank, like, count)

    def waiting_for(self, rank: int) -> Identity | None:
        """See :meth:`Transport.waiting_for`."""
        return next(filter(None, (transport.waiting_for(rank) for transport in self._all)), None)

    def path_counts(self) -> tuple[PathCounts, ...]:
        """See :meth:`Transport.path_counts`."""
        return tuple(counts for transport in self._all for counts in transport.path_counts())

    def abort(self, error: Exception) -> None:
        """See :meth:`Transport.abort`."""
        for transport in self._all:
            transport.abort(error)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        for transport in reversed(self._all):
            transport.close()

    def _carrier_of(self, identity: Identity, source: int, destination: int) -> Transport:
        lane = self.lane_of(identity)
        if lane is not None:
            return self._lanes[lane]
        return self._default if self._default.carries(identity, source, destination) else self._rest
