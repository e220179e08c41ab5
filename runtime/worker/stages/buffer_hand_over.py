"""Buffers that a model changes, handed from worker to worker where several of them compute a replica's microbatches.

A forward pass changes such buffers, as BatchNorm does its running statistics. Each replica has its own, which change in
microbatch order. So the worker of a microbatch takes them from the worker of the one before it. The first one takes them from
their home, and after the last one they go home.

The messages have a class of channels on which these two workers exchange nothing else. So their order is known before a step:
it is that of the sender's forwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from adaptra.graph.ops.specs import MessageSpec
from adaptra.program import Kind, Op, Program
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport
from adaptra.runtime.worker.stages.stage import Stage


class _HandOver(NamedTuple):
    """The buffers of a replica's stage, as they are before a microbatch. Behind the last one there is one more, at home."""

    replica: int
    stage: int
    microbatch: int
    source: int
    destination: int


class BufferHandOver:
    """One rank's buffers that are handed over. Used by the thread that runs the steps.

    In a program of one pipeline, and for stages that change no buffer, there are no messages.

    Args:
        program: A program, with or without messages.
        rank: This rank.
        specs: Per stage its buffers that change; none of a stage on another rank.
        transport: Carries the messages.
        timeout: Seconds to wait for a message before the step fails.
    """

    def __init__(self, program: Program, rank: int, specs: Sequence[MessageSpec], transport: Transport, timeout: float) -> None:
        self._specs = specs
        self._transport = transport
        self._timeout = timeout
        self._step = -1
        every = _hand_overs(program, specs)
        self._given = {(one.replica, one.stage, one.microbatch): one for one in every if one.source == rank}
        self._taken = {(one.replica, one.stage, one.microbatch): one for one in every if one.destination == rank}
        self._starts = [one for one in self._given.values() if one.microbatch == 0]
        self._ends = [one for one in self._taken.values() if one.microbatch == program.microbatches]
        self._unposted: dict[int, list[_HandOver]] = {}
        self._arriving: dict[_HandOver, Pending] = {}

    @property
    def receive_counts(self) -> Counter[tuple[int, MessageSpec]]:
        """The number of receive buffers needed at a time, per source rank and message."""
        return Counter((one.source, self._specs[one.stage]) for one in self._taken.values())

    def begin_step(self, step: int, stages: Mapping[tuple[int, int], Stage]) -> None:
        """Post the receives of a step, and give away buffers whose first microbatch another worker computes."""
        self._step = step
        self._arriving.clear()
        self._unposted = {}
        for one in self._taken.values():
            self._unposted.setdefault(one.source, []).append(one)
        if not self._transport.contract.in_order:  # else a receive would delay the messages behind it
            for some in self._unposted.values():
                self._post_until(some[-1])
        for one in self._starts:
            self._send(one, stages)

    def before_forward(self, op: Op, stages: Mapping[tuple[int, int], Stage]) -> None:
        """Wait for the buffers that an F needs, if another worker has computed the microbatch before.

        Raises:
            TransportError: They could not be exchanged, or not within the timeout.
        """
        if self._taken:
            one = self._taken.get((op.replica, op.stage, op.microbatch))
            if one is not None:
                self._take(one, stages)

    def after_forward(self, op: Op, stages: Mapping[tuple[int, int], Stage]) -> None:
        """Send the buffers that an F has changed, if another worker computes the next microbatch or has their home."""
        if self._given:
            one = self._given.get((op.replica, op.stage, op.microbatch + 1))
            if one is not None:
                self._send(one, stages)

    def end_step(self, stages: Mapping[tuple[int, int], Stage]) -> None:
        """Take home the buffers whose last microbatch another worker has computed; raises as :meth:`before_forward`."""
        for one in self._ends:
            self._take(one, stages)

    def _send(self, one: _HandOver, stages: Mapping[tuple[int, int], Stage]) -> None:
        buffers = stages[one.replica, one.stage].hand_over_buffers()
        self._transport.send(one.destination, self._identity(one), buffers)

    def _take(self, one: _HandOver, stages: Mapping[tuple[int, int], Stage]) -> None:
        self._post_until(one)
        pending = self._arriving.pop(one)
        stages[one.replica, one.stage].take_over_buffers(pending.wait(self._timeout))
        self._transport.release(pending)

    def _post_until(self, last: _HandOver) -> None:
        """Post the receives of a source up to this one, in the order of its sends."""
        while last not in self._arriving:
            one = self._unposted[last.source].pop(0)
            self._arriving[one] = self._transport.receive(one.source, self._identity(one))

    def _identity(self, one: _HandOver) -> Identity:
        return Identity(self._step, Purpose.BUFFERS, one.stage, one.stage, one.microbatch, self._specs[one.stage], one.replica)


def _hand_overs(program: Program, specs: Sequence[MessageSpec]) -> list[_HandOver]:
    """Return all hand-overs of these stages, those of each source in the order in which it sends them."""
    routing = program.routing
    if not any(specs):
        return []
    found: list[tuple[int, _HandOver]] = []
    places = {op: number for order in program.orders for number, op in enumerate(order) if op.kind is Kind.F}
    for replica, row in enumerate(routing.workers):
        for stage, home in enumerate(row):
            if home is None or not specs[stage]:
                continue
            holders = [home, *(routing.holder(replica, stage, number) for number in range(program.microbatches)), home]
            for microbatch, (source, destination) in enumerate(pairwise(holders)):
                if source != destination:
                    sent_after = places[Op(stage, Kind.F, microbatch - 1, None, replica)] if microbatch else -1
                    found.append((sent_after, _HandOver(replica, stage, microbatch, source, destination)))
    return [one for _, one in sorted(found)]
