"""The pass ``insert-crossing``: adds what crosses replicas where a worker of one computes microbatches of another.

The home of a replica has its batch and gets its results. So inputs and targets of such a microbatch travel to the worker that
computes it on the first and the last stage. Results travel back. So does the accumulator of a stage whose last microbatch
another worker computes.

Each replica has its own buffers, such as BatchNorm's running statistics, which its forwards change in microbatch order. So they
travel from worker to worker with the microbatches. The first worker has them from home, and they return behind the last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, NamedTuple

from adaptra.errors import PassError
from adaptra.passes.base import Pass, StageSet, Word, option
from adaptra.passes.insert_comm import LEAST_AHEAD, InsertComm
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import SENT_BY, Way, channel_of, crossings, needs, other_end
from adaptra.program.transport_contract import Contract
from adaptra.simulation.cost import CostModel


@dataclass(frozen=True)
class InsertCrossing(Pass):
    """Add SEND and RECV of what crosses replicas. Compute ops and SEND ops keep their order.

    Inputs and targets are received and sent at the start of the step, the inputs first. Results are sent behind their F, and
    sums behind the last W. Both are received before the stage's REDUCE at home, or at the end of the order.

    Buffers are sent at the start, and behind each F whose next one is on another worker. With ``receives=late`` their RECV
    comes directly before the F that needs them. With ``receives=ahead`` it comes before the F that needs buffers four messages
    earlier on the same channel, or at the start. Behind the last F they come home as results do.

    Guarantees: messages of a channel are received in the order in which they are sent. Where a message overtakes those that
    were there before, their RECV moves to an earlier position. A program in which every worker computes for its own replica
    stays as it is.

    Refuses: a program that has such messages already, or lacks its other messages; ``buffers`` of a stage that it lacks.

    Attributes:
        fold: ``handover``, or ``contributions`` if each worker adds up its own weight gradients.
        buffers: The stages whose forwards change buffers: ``buffers=0+2``.
        receives: ``ahead`` or ``late``.
    """

    name: ClassVar[str] = "insert-crossing"
    fold: str = option("handover", Word("handover|contributions", "handover or contributions"))
    buffers: tuple[int, ...] = option((), StageSet())
    receives: str = option("ahead", Word("ahead|late", "ahead or late"))

    @staticmethod
    def for_contract(contract: Contract, buffers: Collection[int]) -> InsertCrossing:
        """Return the pass for a transport, whose receives come as those of :meth:`.InsertComm.for_contract`."""
        return InsertCrossing(buffers=tuple(sorted(buffers)), receives=InsertComm.for_contract(contract).receives)

    @property
    def uses_cost(self) -> bool:
        """False: no time decides anything."""
        return False

    def apply(self, program: Program, cost: CostModel) -> Program:
        """Return the program with its crossing messages. ``cost`` is not used."""
        return self.of_ranks(program, range(program.ranks))

    def of_ranks(self, program: Program, ranks: Collection[int]) -> Program:
        """Return the program with both ends of the crossing messages to and from these ranks.

        So these ranks have the orders of :meth:`apply`. Their other messages have to be there, with both ends.
        """
        if unknown := sorted(set(self.buffers).difference(range(program.stages))):
            raise PassError(f"{self}: stage {unknown[0]} does not exist: expected 0..{program.stages - 1}")
        if program.routing.stays_at_home:
            return program
        if any(op.kind.is_crossing for order in program.orders for op in order):
            raise PassError(f"{self}: {program.name} has messages of foreign microbatches already: expected none")
        ends = ((send, program.rank_of(send), program.rank_of(other_end(send))) for send in self._crossings(program))
        sends = [send for send, source, destination in ends if source in ranks or destination in ranks]
        if sends and not program.is_lowered and _implies_messages(program, self.fold == "handover", ranks):
            raise PassError(f"{self}: {program.name} lacks the messages between its ranks: run insert-comm first")
        near = sorted(program.routing.peers(ranks))
        return _with_messages(program, sends, LEAST_AHEAD if self.receives == "ahead" else 0, near) if sends else program

    def _crossings(self, program: Program) -> Iterator[Op]:
        return crossings(program, self.fold == "handover", self.buffers)


class _Placed(NamedTuple):
    """A message of a channel: where its source sends it, and the last position for its RECV."""

    sent: tuple[int, int]
    latest: int
    receive: Op


def _implies_messages(program: Program, hands_over: bool, ranks: Collection[int]) -> bool:
    return any(
        program.holder(need.replica, need.stage, need.microbatch) != rank
        for rank in ranks
        for op in program.orders[rank]
        for need in needs(op, program, lowered=False, hands_over=hands_over)
    )


def _with_messages(program: Program, sends: Sequence[Op], ahead: int, ranks: Sequence[int]) -> Program:
    places = {op: (rank, number) for rank in ranks for number, op in enumerate(program.orders[rank])}
    channels = _channels(program, sends, places)
    sent_behind: defaultdict[tuple[int, int], list[Op]] = defaultdict(list)
    for send in sends:
        sent_behind[program.rank_of(send), _behind(send, program, places)].append(send)
    received_before: defaultdict[tuple[int, int], list[Op]] = defaultdict(list)
    moved: set[Op] = set()
    for (_, rank, _), messages in sorted(channels.items(), key=lambda item: (*item[0][:2], item[0][2].value)):
        for position, message in zip(_positions(messages, ahead), messages, strict=True):
            received_before[rank, position].append(message.receive)
            moved.add(message.receive)
    orders = list(program.orders)
    for rank in ranks:
        order, ops = program.orders[rank], list[Op]()
        for number in range(-1, len(order) + 1):
            ops += received_before[rank, number]
            if 0 <= number < len(order) and order[number] not in moved:
                ops.append(order[number])
            ops += sent_behind[rank, number]
        orders[rank] = tuple(ops)
    return replace(program, orders=tuple(orders))


def _positions(messages: Sequence[_Placed], ahead: int) -> list[int]:
    """Return the position of each message's RECV, none behind that of a later message."""
    needed = [message.latest for message in messages if message.receive.kind is Kind.RECV_BUFFERS]
    early = iter([-1] * min(ahead, len(needed)) + needed)
    latest = [next(early) if message.receive.kind is Kind.RECV_BUFFERS else message.latest for message in messages]
    return list(accumulate(reversed(latest), min))[::-1]


def _behind(send: Op, program: Program, places: Mapping[Op, tuple[int, int]]) -> int:
    """Return the position of the op behind which a SEND goes: its producer, or the last SEND right behind that; -1 without."""
    for need in needs(send, program, lowered=True):
        rank, number = next(places[op] for op in need.ops if op in places)
        order = program.orders[rank]
        while number + 1 < len(order) and order[number + 1].kind in SENT_BY.values():
            number += 1
        return number
    return -1


def _before(receive: Op, program: Program, places: Mapping[Op, tuple[int, int]]) -> int:
    """Return the position of the op before which a RECV goes at the latest; -1 at the start, and else the end."""
    if receive.kind in (Kind.RECV_INPUT, Kind.RECV_TARGET):
        return -1
    if receive.kind is Kind.RECV_BUFFERS and receive.microbatch < program.microbatches:
        return places[Op(receive.stage, Kind.F, receive.microbatch, None, receive.replica)][1]
    reduce = Op(receive.stage, Kind.REDUCE, 0, None, receive.replica)
    return places[reduce][1] if reduce in places else len(program.orders[program.rank_of(receive)])


def _channels(
    program: Program, sends: Sequence[Op], places: Mapping[Op, tuple[int, int]]
) -> Mapping[tuple[int, int, Way], list[_Placed]]:
    """Return the messages of each channel that gets new ones, in the order in which they are sent."""
    channels: defaultdict[tuple[int, int, Way], list[_Placed]] = defaultdict(list)
    for number, send in enumerate(sends):
        sent, receive = (_behind(send, program, places), number), other_end(send)
        channels[channel_of(send, program)].append(_Placed(sent, _before(receive, program, places), receive))
    for op, (rank, number) in places.items():
        if op.kind in SENT_BY and (channel := channel_of(other_end(op), program)) in channels:
            _, before = places[other_end(op)]
            channels[channel].append(_Placed((before, -1), number, program.orders[rank][number]))
    return {channel: sorted(messages, key=lambda one: one.sent) for channel, messages in channels.items()}
