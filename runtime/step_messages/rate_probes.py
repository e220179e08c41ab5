"""Rate probes: now and then two messages of an activation's size cross an edge that no microbatch takes.

Where a detour or a share leaves an edge idle, a probe of a few bytes tells its latency and nothing of its rate. So nobody would
notice that a narrow link has become wide again.

The receiving end asks. It posts the receive first, then says so in its own probe of a few bytes. The sending end answers when
its step ends. No op waits for a rate probe, and no step does. It travels in the bulk class, which gives way to all others.

The two messages are sent at once, so they arrive one occupancy apart. The first one alone would tell less. A connection on
which nothing was sent for a while begins slowly, and only the second message finds it as fast as the link is.

At most one rate probe is under way on an edge, and there is one in :data:`EVERY` steps. An occupancy that differs from the one
before, by :data:`DIFFERENCE` of it and :data:`LEAST`, may be a recovery. The detector wants several steps to see it, so then
there is one in each of the next :data:`IN_A_ROW` steps. The first one, at once, is compared with what the last messages over
the edge told: the link may recover while microbatches leave it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from adaptra.errors import PeerLostError
from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.program.placement import Edge
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport

EVERY: Final = 8
"""The number of steps in which an idle edge carries one rate probe."""

IN_A_ROW: Final = 16
"""The number of steps with one each after a difference: twice as many as the detector wants to agree about a lossy edge."""

DIFFERENCE: Final = 0.25
"""The fraction of an occupancy by which the next one differs that may be a recovery."""

LEAST: Final = 1e-3
"""The seconds by which it differs at least. Shorter ones limit no step, and scatter more."""

_MESSAGES: Final = 2


@dataclass(slots=True)
class _Arriving:
    """The rate probes to this rank over one edge.

    Attributes:
        pending: The messages of the one under way.
        latency: The flight of the few bytes of the step in which it was asked for, which it can't have delayed; seconds.
        usual: The occupancy with which the next ones are compared, seconds.
        idle: The last step in which no message came over the edge.
        due: The next step in which to ask.
        eager: The number of steps in which to ask without a pause.
    """

    pending: tuple[Pending, ...] = ()
    latency: float | None = None
    usual: float | None = None
    idle: int | None = None
    due: int = 0
    eager: int = 0


class RateProbes:
    """One rank's rate probes. Used by the thread that runs the steps.

    Args:
        rank: This rank and its stage.
        sizes: Bytes of a message by its directed edge, of the edges that begin or end here.
        transport: Carries the probes.
        monitor: Records their flights.
    """

    def __init__(self, rank: int, sizes: Mapping[Edge, int], transport: Transport, monitor: Monitor) -> None:
        self._rank = rank
        self._specs = {edge: (TensorSpec((size,), torch.uint8),) for edge, size in sizes.items()}
        self._transport = transport
        self._monitor = monitor
        self._arriving = {edge[0]: _Arriving() for edge in sizes if edge[1] == rank}
        self._contents: dict[int, tuple[Tensor]] = {}

    def receive_counts(self, heard: Collection[int]) -> dict[tuple[int, MessageSpec], int]:
        """Return the number of receive buffers, per source rank and message, where only these stages' messages come."""
        return {(stage, self._specs[stage, self._rank]): _MESSAGES for stage in self._arriving if stage not in heard}

    def ask(self, step: int, stage: int) -> bool:
        """Return whether to ask a stage, none of whose messages comes in this step, and post the receive if so."""
        edge = self._arriving.get(stage)
        if edge is None:
            return False
        if edge.idle != step - 1:
            edge.usual, edge.due = self._monitor.occupancy(stage, self._rank), step
        edge.idle = step
        if edge.pending or (step < edge.due and not edge.eager):
            return False
        edge.pending = tuple(self._transport.receive(stage, one) for one in self._identities(step, stage, self._rank))
        edge.latency = None
        edge.due, edge.eager = step + EVERY, max(edge.eager - 1, 0)
        return True

    def answer(self, step: int, stage: int) -> None:
        """Send the rate probe for which a stage has asked in a step. Does not wait."""
        if stage not in self._contents:
            size = self._specs[self._rank, stage][0].elements
            self._contents[stage] = (torch.zeros(size, dtype=torch.uint8),)
        for one in self._identities(step, self._rank, stage):
            self._transport.send(stage, one, self._contents[stage])

    def end_step(self, latencies: Mapping[int, float]) -> None:
        """Record the rate probes that have arrived.

        Args:
            latencies: The flights of this step's few bytes by the stage that sent them, seconds.

        Raises:
            TransportError: Another message came.
        """
        for stage, edge in self._arriving.items():
            if not edge.pending:
                continue
            if edge.latency is None:
                edge.latency = latencies[stage]
            if not all(one.done for one in edge.pending):
                continue
            first, second = edge.pending
            edge.pending = ()
            try:
                for one in (first, second):
                    one.wait()
                    self._transport.release(one)
            except PeerLostError:
                continue  # the other end may be done with the job; who needs it finds out
            occupancy = second.arrived_at - first.arrived_at
            self._monitor.rate_probe(stage, self._rank, edge.latency, occupancy)
            if edge.usual is None:
                edge.usual = occupancy
            elif abs(occupancy - edge.usual) > max(DIFFERENCE * edge.usual, LEAST):
                edge.usual, edge.eager = occupancy, IN_A_ROW

    def _identities(self, step: int, source: int, destination: int) -> Iterator[Identity]:
        specs = self._specs[source, destination]
        for number in range(_MESSAGES):
            yield Identity(step, Purpose.RATE_PROBE, source, destination, number, specs)
