"""The pass ``insert-comm``: adds SEND and RECV for every message between ranks, at positions that suit the transport.

The position of a receive decides the cost of a slow link. We measured one adapted order on four ranks: 16 microbatches of three
20 ms ops, 60 ms one-way latency on one edge. The best possible step takes 1080 ms.

| transport | receives as torch's | late, at the consumer | ahead of need |
|---|---|---|---|
| gloo: a send waits for its receiver | 1786 ms | 3233 ms | 1188 ms |
| one in-order stream per pair of ranks | 1683 ms | 1115 ms | not measured |

A transport states its kind in its :class:`adaptra.program.transport_contract.Contract`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, NamedTuple

from adaptra.errors import PassError
from adaptra.passes.base import Count, Pass, Word, option
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import RECEIVED_BY, SENT_BY, needs
from adaptra.program.transport_contract import Contract
from adaptra.simulation.cost import CostModel
from adaptra.simulation.job import alike_case
from adaptra.simulation.simulate import simulate
from adaptra.simulation.timeline import OpInterval

LEAST_AHEAD: Final = 4
"""Least number of receives posted ahead on a channel, so that a link that becomes slow costs only its own latency."""


@dataclass(frozen=True)
class InsertComm(Pass):
    """Add SEND and RECV ops for all messages that cross ranks. Compute ops keep their order.

    A SEND comes directly after the op that makes its message. A RECV posts a receive and doesn't wait; the compute op that
    needs the message waits. With ``receives=late`` a RECV comes directly before that op. With ``receives=ahead`` it comes
    before the op that needs the message ``ahead`` messages earlier on the same channel, or at the start of the step.

    With several replicas the routes say between which workers a message goes. SEND_W and RECV_W hand the accumulator over
    between the workers of consecutive microbatches, unless each worker adds up its own.

    A channel is (source rank, destination rank, forward, backward or accumulators). Guarantees: messages of a channel are
    received in the order in which they are sent. At most ``ahead + 1`` receives of a channel are posted and not yet used by
    their op, or one with ``receives=late``. The exception is a channel that several stages of one rank share and use in another
    order.

    Refuses: a program that already has communication ops; ``ahead`` together with ``receives=late``.

    Attributes:
        receives: ``ahead`` or ``late``.
        ahead: The number of messages by which receives are posted ahead, on every channel. By default it follows from each
            channel's latency under the cost model: no message is late because of its receive. It is at least 4. With several
            replicas all workers count as equally fast, and hand-overs as without latency.
        fold: ``handover``, or ``contributions`` if each worker adds up its own weight gradients.
    """

    name: ClassVar[str] = "insert-comm"
    receives: str = option("ahead", Word("ahead|late", "ahead or late"))
    ahead: int | None = option(None, Count(1))
    fold: str = option("handover", Word("handover|contributions", "handover or contributions"))

    def __post_init__(self) -> None:
        if self.receives not in ("ahead", "late"):
            raise PassError(f"{self.name}: receives={self.receives}: expected receives=ahead or receives=late")
        if self.fold not in ("handover", "contributions"):
            raise PassError(f"{self.name}: fold={self.fold}: expected fold=handover or fold=contributions")
        if self.receives == "late" and self.ahead is not None:
            raise PassError(f"{self.name}: ahead={self.ahead} together with receives=late: expected one of them")

    @staticmethod
    def for_contract(contract: Contract, ahead: int | None = None) -> InsertComm:
        """Return the pass with the options that suit a transport. ``ahead`` is used only if receives are posted ahead.

        In-order streams get late receives, since an early one would delay the sends after it. Otherwise, if a send waits for
        its receiver, receives are posted ahead. If neither is true, messages do not depend on their receives, and late receives
        keep the pools smallest.
        """
        if contract.send_waits_for_receiver and not contract.in_order:
            return InsertComm(receives="ahead", ahead=ahead)
        return InsertComm(receives="late")

    @property
    def uses_cost(self) -> bool:
        """Whether latencies decide how far ahead receives are posted."""
        return self.receives == "ahead" and self.ahead is None

    def apply(self, program: Program, cost: CostModel) -> Program:
        """Return the program with its messages. Without ``ahead``, ``cost`` decides how far ahead receives are posted."""
        return self.of_ranks(program, cost, range(program.ranks))

    def of_ranks(self, program: Program, cost: CostModel, ranks: Collection[int]) -> Program:
        """Return the program with both ends of the messages to and from these ranks.

        So these ranks have the orders of :meth:`apply`. It reads their orders and those of their peers, and simulated times.
        """
        if program.is_lowered:
            raise PassError(f"{self}: {program.name} holds SEND and RECV ops already: expected compute ops only")
        near = program.routing.peers(ranks)
        channels = _channels(program, self._hands_over, ranks)
        counts = self._counts(program, cost, channels)
        received_before: defaultdict[tuple[int, int], list[Op]] = defaultdict(list)
        sends: defaultdict[Op, list[Op]] = defaultdict(list)
        # Activations and gradients go first: other workers may wait for them.
        for channel, messages in sorted(channels.items(), key=lambda item: (item[0].accumulators, item[0])):
            for (rank, index), message in zip(_places(messages, counts[channel]), messages, strict=True):
                received_before[rank, index].append(message.receive)
                sends[message.producer].append(message.send)
        orders = tuple(
            tuple(_with_messages(order, [received_before[rank, index] for index in range(len(order))], sends))
            if rank in near
            else order
            for rank, order in enumerate(program.orders)
        )
        return replace(program, orders=orders)

    def ahead_of_need(self, program: Program, cost: CostModel) -> Mapping[Channel, int]:
        """Return, per channel of a compute-only program, by how many messages :meth:`apply` posts receives ahead."""
        return self._counts(program, cost, _channels(program, self._hands_over, range(program.ranks)))

    @property
    def _hands_over(self) -> bool:
        return self.fold == "handover"

    def _counts(self, program: Program, cost: CostModel, channels: Mapping[Channel, list[Message]]) -> Mapping[Channel, int]:
        if self.receives == "late":
            return dict.fromkeys(channels, 0)
        if self.ahead is not None:
            return dict.fromkeys(channels, self.ahead)
        return _counts_needed(program, cost, channels, self._hands_over)


class Channel(NamedTuple):
    """The messages of one direction between two ranks, which are received in the order in which they are sent."""

    source: int
    destination: int
    forward: bool
    accumulators: bool = False


class Message(NamedTuple):
    """One message between ranks, and the positions of its producer and consumer in the compute-only program."""

    producer: Op
    send: Op
    receive: Op
    source: tuple[int, int]
    consumer: tuple[int, int]


def _channels(program: Program, hands_over: bool, ranks: Collection[int]) -> Mapping[Channel, list[Message]]:
    """Return all messages to and from these ranks, on each channel in the order in which they are sent."""
    channels: defaultdict[Channel, list[Message]] = defaultdict(list)
    near = sorted(program.routing.peers(ranks))
    places = {op: (rank, index) for rank in near for index, op in enumerate(program.orders[rank])}
    stays_home = program.routing.stays_at_home
    for consumer, place in places.items():
        if consumer.kind is Kind.W and stays_home:
            continue  # no accumulator is handed over
        for stage, kinds, microbatch, replica in needs(consumer, program, lowered=False, hands_over=hands_over):
            holder = program.holder(replica, stage, microbatch)
            if holder == place[0] or (holder not in ranks and place[0] not in ranks):
                continue
            producer = next(op for made in kinds if (op := Op(stage, made, microbatch, None, replica)) in places)
            source = places[producer]
            kind = RECEIVED_BY.get(stage - consumer.stage, Kind.RECV_W)
            send = Op(stage, SENT_BY[kind], microbatch, None, replica)
            receive = Op(consumer.stage, kind, consumer.microbatch, None, replica)
            channel = Channel(source[0], place[0], kind is Kind.RECV_F, kind is Kind.RECV_W)
            channels[channel].append(Message(producer, send, receive, source, place))
    for messages in channels.values():
        messages.sort(key=lambda message: message.source)
    return channels


def _places(messages: Sequence[Message], ahead: int) -> list[tuple[int, int]]:
    """Return the position of each message's RECV: never after its own consumer or a later message's RECV."""
    late: list[tuple[int, int]] = []
    for message in reversed(messages):
        late.append(min(message.consumer, late[-1]) if late else message.consumer)
    late.reverse()
    rank = messages[0].consumer[0]
    return [late[index - ahead] if index >= ahead else (rank, 0) for index in range(len(messages))]


def _counts_needed(
    program: Program, cost: CostModel, channels: Mapping[Channel, list[Message]], hands_over: bool
) -> dict[Channel, int]:
    """Return, per channel, by how many messages receives must be posted ahead so that no message is late because of them.

    With a rendezvous, the notice of a posted receive takes the reverse direction's latency c' to the sender, and the message
    takes o + c. A receive posted at p is early enough if p + c' is no later than the end of the producer. It is also early
    enough if p + c' + o + c is no later than the start of the consumer.
    """
    ranks = {rank for channel in channels for rank in channel[:2]}
    ops = _times(program, cost, hands_over, ranks)
    counts: dict[Channel, int] = {}
    for channel, messages in channels.items():
        # A RECV is posted when the op before it ends.
        posted = [ops[rank][index - 1].end if index else 0.0 for rank, index in _places(messages, 0)]
        needed = LEAST_AHEAD
        for number, message in enumerate(messages):
            (source, sent), (rank, used) = message.source, message.consumer
            there, back = _delays(message, cost)
            latest = max(ops[source][sent].end - back, ops[rank][used].start - back - there)
            needed = max(needed, number - (bisect_right(posted, latest) - 1))
        counts[channel] = min(needed, len(messages))
    return counts


def _times(program: Program, cost: CostModel, hands_over: bool, ranks: Collection[int]) -> Mapping[int, Sequence[OpInterval]]:
    """Return when each of these ranks runs its ops, in a step that begins with all ranks idle."""
    costs = cost if program.is_one_pipeline else alike_case(program, cost, hands_over=hands_over)
    simulation = simulate(program, costs)
    return {rank: simulation.computed(rank) for rank in ranks}


def _delays(message: Message, cost: CostModel) -> tuple[float, float]:
    """Return the time of the message to its receiver, and that of the posted receive's notice to the sender."""
    if message.receive.kind is Kind.RECV_W:
        return 0.0, 0.0
    edge = min(message.producer.stage, message.receive.stage)
    forward = cost.latency_forward[edge], cost.occupancy_forward[edge]
    backward = cost.latency_backward[edge], cost.occupancy_backward[edge]
    (latency, occupancy), (back, _) = (forward, backward) if message.receive.kind is Kind.RECV_F else (backward, forward)
    return latency + occupancy, back


def _with_messages(order: Sequence[Op], receives: Sequence[Sequence[Op]], sends: Mapping[Op, Sequence[Op]]) -> Iterator[Op]:
    for op, before in zip(order, receives, strict=True):
        yield from before
        yield op
        yield from sends.get(op, ())
