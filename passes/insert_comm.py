"""The pass ``insert-comm``: SEND and RECV for every message between ranks, where the transport wants them.

Where a receive stands decides what a slow link costs. Measured with one adapted order (four ranks, 16 microbatches of three
20 ms ops, 60 ms one-way latency on one edge, best possible 1080 ms):

=====================================  ====================  ======================  ======================
transport                              receives as torch's   late, at the consumer   ahead of need
=====================================  ====================  ======================  ======================
gloo: a send waits for its receiver    1786 ms               3233 ms                 1188 ms
one in-order stream per pair of ranks  1683 ms               1115 ms                 not measured
=====================================  ====================  ======================  ======================

A transport says which of the two it is in its :class:`adaptra.program.transport_contract.Contract`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, NamedTuple

from adaptra.errors import PassError
from adaptra.passes.base import Count, Pass, Word, option
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import RECEIVED_BY, RULE, SENT_BY
from adaptra.program.transport_contract import Contract
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

LEAST_AHEAD: Final = 4
"""Receives posted ahead on a channel even when its latency asks for fewer, so that a link that turns slow is only slow."""


@dataclass(frozen=True)
class InsertComm(Pass):
    """Add SEND and RECV ops for all messages that cross ranks; compute ops keep their order.

    A SEND stands directly behind the op that makes its message. A RECV posts a receive and doesn't wait; the compute op that
    needs the message does. With ``receives=late`` a RECV stands directly before that op. With ``receives=ahead`` it stands
    before the op that needs the message ``ahead`` places earlier on the same channel, or at the start of the step.

    Guarantees: on every channel (source rank, destination rank, forward or backward) messages are received in the order in
    which they are sent; at most ``ahead + 1`` receives of a channel are posted and not yet used by their op, one with
    ``receives=late``, unless several stages of one rank share the channel and use its messages in another order.

    Refuses: a program that holds communication ops already; ``ahead`` together with ``receives=late``.

    Attributes:
        receives: ``ahead`` or ``late``.
        ahead: How many messages ahead receives are posted, on every channel. By default as many as each channel's
            latency needs under the cost model: so many that no message is late because its receive was, and at least 4.
    """

    name: ClassVar[str] = "insert-comm"
    receives: str = option("ahead", Word("ahead|late", "ahead or late"))
    ahead: int | None = option(None, Count(1))

    def __post_init__(self) -> None:
        if self.receives not in ("ahead", "late"):
            raise PassError(f"{self.name}: receives={self.receives}: expected receives=ahead or receives=late")
        if self.receives == "late" and self.ahead is not None:
            raise PassError(f"{self.name}: ahead={self.ahead} together with receives=late: expected one of them")

    @staticmethod
    def for_contract(contract: Contract, ahead: int | None = None) -> InsertComm:
        """The pass with the options that suit a transport, ``ahead`` where receives are posted ahead.

        In-order streams get late receives: an early one would hold up the sends behind it. Else, where a send waits for its
        receiver, receives are posted ahead. Where neither holds, a message travels without its receive, and late ones keep the
        pools smallest.
        """
        if contract.send_waits_for_receiver and not contract.in_order:
            return InsertComm(receives="ahead", ahead=ahead)
        return InsertComm(receives="late")

    def apply(self, program: Program, cost: CostModel) -> Program:
        """The program with its messages; ``cost`` decides how far ahead receives are posted, unless ``ahead`` does."""
        if program.is_lowered:
            raise PassError(f"{self}: {program.name} holds SEND and RECV ops already: expected compute ops only")
        channels = _channels(program)
        counts = self._counts(program, cost, channels)
        received_before: defaultdict[tuple[int, int], list[Op]] = defaultdict(list)
        for channel, messages in sorted(channels.items()):
            for (rank, index), message in zip(_places(messages, counts[channel]), messages, strict=True):
                received_before[rank, index].append(message.receive)
        sends = {message.producer: message.send for messages in channels.values() for message in messages}
        orders = tuple(
            tuple(_with_messages(order, [received_before[rank, index] for index in range(len(order))], sends))
            for rank, order in enumerate(program.orders)
        )
        return replace(program, orders=orders)

    def ahead_of_need(self, program: Program, cost: CostModel) -> Mapping[Channel, int]:
        """How many messages ahead of need :meth:`apply` posts the receives of each channel of a compute-only program."""
        return self._counts(program, cost, _channels(program))

    def _counts(self, program: Program, cost: CostModel, channels: Mapping[Channel, list[Message]]) -> Mapping[Channel, int]:
        if self.receives == "late":
            return dict.fromkeys(channels, 0)
        if self.ahead is not None:
            return dict.fromkeys(channels, self.ahead)
        return _counts_needed(program, cost, channels)


class Channel(NamedTuple):
    """Messages of one direction between two ranks; they are received in the order in which they are sent."""

    source: int
    destination: int
    forward: bool


class Message(NamedTuple):
    """One message between ranks, and where its two ends stand in the compute-only program."""

    producer: Op
    send: Op
    receive: Op
    source: tuple[int, int]
    consumer: tuple[int, int]


def _channels(program: Program) -> Mapping[Channel, list[Message]]:
    """All messages between ranks, on each channel in the order in which they are sent."""
    found: defaultdict[Channel, list[Message]] = defaultdict(list)
    places = {op: (rank, index) for rank, order in enumerate(program.orders) for index, op in enumerate(order)}
    for consumer, place in places.items():
        for offset, kinds in RULE[consumer.kind]:
            stage = consumer.stage + offset
            if offset == 0 or not 0 <= stage < program.stages or program.placement[stage] == place[0]:
                continue
            kind = RECEIVED_BY[offset]
            (producer,) = (op for op in (Op(stage, made, consumer.microbatch) for made in kinds) if op in places)
            send = Op(stage, SENT_BY[kind], consumer.microbatch)
            channel = Channel(program.placement[stage], place[0], kind is Kind.RECV_F)
            receive = Op(consumer.stage, kind, consumer.microbatch)
            found[channel].append(Message(producer, send, receive, places[producer], place))
    for messages in found.values():
        messages.sort(key=lambda message: message.source)
    return found


def _places(messages: Sequence[Message], ahead: int) -> list[tuple[int, int]]:
    """Before which op of its rank each message's RECV stands: never behind its own consumer or a later message's RECV."""
    late: list[tuple[int, int]] = []
    for message in reversed(messages):
        late.append(min(message.consumer, late[-1]) if late else message.consumer)
    late.reverse()
    rank = messages[0].consumer[0]
    return [late[index - ahead] if index >= ahead else (rank, 0) for index in range(len(messages))]


def _counts_needed(program: Program, cost: CostModel, channels: Mapping[Channel, list[Message]]) -> dict[Channel, int]:
    """How many messages ahead each channel's receives must be posted so that none is late because its receive was.

    With a rendezvous, the word that a receive is posted takes the way back's latency c' to the sender, and the message takes
    o + c. A receive posted at p is early enough if p + c' is no later than the end of the producer, or p + c' + o + c no later
    than the start of the consumer.
    """
    ops = simulate(program, cost).timeline.ops
    counts: dict[Channel, int] = {}
    for channel, messages in channels.items():
        # A RECV is posted once the op before it has ended.
        posted = [ops[rank][index - 1].end if index else 0.0 for rank, index in _places(messages, 0)]
        needed = LEAST_AHEAD
        for number, message in enumerate(messages):
            (source, sent), (rank, used) = message.source, message.consumer
            there, back = _delays(message, cost)
            latest = max(ops[source][sent].end - back, ops[rank][used].start - back - there)
            needed = max(needed, number - (bisect_right(posted, latest) - 1))
        counts[channel] = min(needed, len(messages))
    return counts


def _delays(message: Message, cost: CostModel) -> tuple[float, float]:
    """What the message takes to its receiver, and what word of the posted receive takes to the sender."""
    edge = min(message.producer.stage, message.receive.stage)
    forward = cost.latency_forward[edge], cost.occupancy_forward[edge]
    backward = cost.latency_backward[edge], cost.occupancy_backward[edge]
    (latency, occupancy), (back, _) = (forward, backward) if message.receive.kind is Kind.RECV_F else (backward, forward)
    return latency + occupancy, back


def _with_messages(order: Sequence[Op], receives: Sequence[Sequence[Op]], sends: Mapping[Op, Op]) -> Iterator[Op]:
    for op, before in zip(order, receives, strict=True):
        yield from before
        yield op
        if op in sends:
            yield sends[op]
