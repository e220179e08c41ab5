"""Probes: a few bytes per step over every edge, whose flight is nearly the edge's latency alone.

If no message queues for another, a slow edge's messages can't separate a longer latency from a lower rate, since all have the
same size. A message of a few bytes can.

A rank sends a probe to a neighbour as soon as it has that neighbour's first message of the step. By then the neighbour has
posted the receive, so transports whose sends wait for receives send it at once. Only the end of a step waits for its probes,
which costs nothing: a neighbour's messages of the next step leave it later.

A probe never queues with an activation: it takes the channel of losses and of the gradients of shared parameters. There its
receive is posted first, so it is the step's first message. Where routes let a rank work for long before it hears from its
neighbour, a gradient may be ready sooner. Then the probe leaves just before it.

Where probes would queue with other messages there are none: if two ranks share one queue for everything, or several edges.

The byte of a probe says whether its sender asks for a rate probe, see :mod:`.rate_probes`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch

from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.program.placement import Edge, has_several
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.step_messages.rate_probes import RateProbes
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport

SPEC: Final[MessageSpec] = (TensorSpec((1,), torch.uint8, stays_on_host=True),)


class Probes:
    """One rank's probes. Used by the thread that runs the steps.

    Args:
        rank: This rank, and its stage if there are probes.
        placement: ``placement[stage]`` is the stage's rank.
        transport: Carries the probes.
        monitor: Records their flights.
        sizes: Bytes of a message of each directed edge between neighbours, for rate probes.
    """

    def __init__(
        self, rank: int, placement: Sequence[int], transport: Transport, monitor: Monitor, sizes: Mapping[Edge, int]
    ) -> None:
        self._rank = rank
        stages = len(placement)
        is_in_line = transport.contract.in_order or has_several(placement)
        neighbours = () if is_in_line else (rank - 1, rank + 1)
        self._neighbours = tuple(stage for stage in neighbours if 0 <= stage < stages)
        self._transport = transport
        self._monitor = monitor
        self._contents = [(torch.tensor([asks], dtype=torch.uint8),) for asks in (False, True)]
        own = {edge: size for edge, size in sizes.items() if rank in edge and self._neighbours}
        self._rates = RateProbes(rank, own, transport, monitor)
        self._asked: set[int] = set()
        self._step = 0
        self._unanswered: set[int] = set()
        self._pending: list[tuple[int, Pending]] = []

    def receive_counts(self) -> dict[tuple[int, MessageSpec], int]:
        """Return the number of receive buffers that probes need at a time, per source rank and message."""
        return {(stage, SPEC): 1 for stage in self._neighbours}

    def receive_counts_of(self, heard: Collection[int]) -> dict[tuple[int, MessageSpec], int]:
        """Return the same of rate probes, where only these stages' messages come to this rank's pipeline."""
        return self._rates.receive_counts(heard)

    def begin_step(self, step: int, heard: Collection[int] | None = None) -> None:
        """Post the receives of this step's probes.

        Args:
            step: The step's number.
            heard: The stages whose messages will come to this rank's pipeline; None for all. A neighbour whose messages take
                other routes is sent its probe at once, and is asked for a rate probe now and then.
        """
        self._step = step
        self._unanswered = set(self._neighbours)
        self._pending = [
            (stage, self._transport.receive(stage, self._identity(stage, self._rank))) for stage in self._neighbours
        ]
        idle = () if heard is None else sorted(self._unanswered - set(heard))
        self._asked = {stage for stage in idle if self._rates.ask(step, stage)}
        for stage in idle:
            self.answer(stage)

    def answer(self, stage: int) -> None:
        """Send the probe to a stage if it is a neighbour and has not got it yet.

        Called when a message of this step has come from the stage, and before another one leaves on the probe's channel.
        """
        if stage in self._unanswered:
            self._unanswered.discard(stage)
            self._transport.send(stage, self._identity(self._rank, stage), self._contents[stage in self._asked])

    def end_step(self, timeout: float) -> None:
        """Record the probes in the monitor.

        Args:
            timeout: Seconds to wait for one that is still under way.

        Raises:
            TransportError: A probe could not be exchanged.
        """
        latencies: dict[int, float] = {}
        for stage, pending in self._pending:
            (content,) = pending.wait(timeout)
            if content.item():
                self._rates.answer(self._step, stage)
            # On an idle edge the neighbour may have sent it before this rank began the step and asked for it.
            self._monitor.probe(stage, self._rank, pending.departed_at, pending.arrived_at)
            latencies[stage] = pending.arrived_at - pending.departed_at
            self._transport.release(pending)
        self._pending = []
        self._rates.end_step(latencies)

    def _identity(self, source: int, destination: int) -> Identity:
        return Identity(self._step, Purpose.PROBE, source, destination, 0, SPEC)
