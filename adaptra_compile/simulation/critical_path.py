"""The critical path of a simulated step: the ops and messages to shorten so that the step ends earlier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from adaptra.program import Kind, Op
from adaptra.program.dependencies import RECEIVED_BY, RULE, SENT_BY
from adaptra.simulation.cost import Blocking, CostModel
from adaptra.simulation.timeline import MessageInterval, OpInterval

Interval = OpInterval | MessageInterval


def critical_path(
    ops: Sequence[Sequence[OpInterval]], messages: Iterable[MessageInterval], placement: Sequence[int], cost: CostModel
) -> tuple[Interval, ...]:
    """Return a chain of ops and messages without gaps, from time zero to the end of the last op.

    Each op starts exactly when its predecessor in the chain ends. The predecessor is the op before it on its rank or the
    message with its input. If communication blocks, it may also be a message that blocked its rank. Each message departs
    exactly when its predecessor releases it. If ``departed`` equals ``posted``, the predecessor is the op that posted it.
    Otherwise it is the message that occupied the link until then, which may arrive later.

    Args:
        ops: Per rank, its compute ops in execution order, as simulated under ``cost``.
        messages: All messages of the same simulation, also those between stages of one rank.
        placement: ``placement[stage]`` is the stage's rank.
        cost: The cost model of the simulation.
    """
    if not any(ops):
        return ()
    causes = _Causes(ops, messages, placement, cost)
    step: Interval | None = max((order[-1] for order in ops if order), key=lambda interval: interval.end)
    path: list[Interval] = []
    while step is not None:
        path.append(step)
        match step:
            case OpInterval():
                step = causes.of_op(step)
            case MessageInterval():
                step = causes.of_message(step)
    return tuple(reversed(path))


_Sent = tuple[Kind, int, int]  # SEND kind, sending stage, microbatch


class _Causes:
    """Finds the last event before an op or a message could start. Simulated times are equal to the last digit."""

    def __init__(
        self,
        ops: Sequence[Sequence[OpInterval]],
        messages: Iterable[MessageInterval],
        placement: Sequence[int],
        cost: CostModel,
    ) -> None:
        self._ops: Final = ops
        self._cost: Final = cost
        self._index: Final = {interval.op: index for order in ops for index, interval in enumerate(order)}
        self._placement: Final = placement
        self._sent: Final[dict[_Sent, MessageInterval]] = {}
        self._holding: Final[dict[tuple[int, float], list[MessageInterval]]] = defaultdict(list)
        self._freeing: Final[dict[tuple[object, float], list[MessageInterval]]] = defaultdict(list)
        for message in messages:
            self._sent[message.kind, message.source, message.microbatch] = message
            self._freeing[self._link(message), self._freed(message)].append(message)
            for held in self._held_ranks(message):
                self._holding[held, message.arrived].append(message)

    def of_op(self, interval: OpInterval) -> Interval | None:
        if interval.start == 0.0:
            return None
        index = self._index[interval.op]
        if index > 0 and self._ops[interval.rank][index - 1].end == interval.start:
            return self._ops[interval.rank][index - 1]
        candidates = [*self._inputs(interval.op), *self._holding.get((interval.rank, interval.start), ())]
        return next(message for message in candidates if message.arrived == interval.start)

    def of_message(self, message: MessageInterval) -> Interval | None:
        if message.departed > message.posted:
            freeing = self._freeing[self._link(message), message.departed]
            return next(other for other in freeing if other.departed < message.departed)
        (producer,) = (
            self._ops[rank][self._index[op]]
            for kind in RULE[message.kind][0].kinds
            for op in (Op(message.source, kind, message.microbatch),)
            for rank in (self._placement[message.source],)
            if op in self._index
        )
        return producer

    def _inputs(self, op: Op) -> list[MessageInterval]:
        keys = [(SENT_BY[RECEIVED_BY[offset]], op.stage + offset, op.microbatch) for offset, *_ in RULE[op.kind] if offset != 0]
        return [self._sent[key] for key in keys if key in self._sent]

    def _held_ranks(self, message: MessageInterval) -> tuple[int, ...]:
        match self._cost.blocking:
            case Blocking.NONE:
                return ()
            case Blocking.SEND:
                return (self._placement[message.source],)
            case Blocking.BOTH:
                return (self._placement[message.source], self._placement[message.destination])

    def _link(self, message: MessageInterval) -> object:
        ends = self._placement[message.source], self._placement[message.destination]
        return frozenset(ends) if self._cost.half_duplex else ends

    def _freed(self, message: MessageInterval) -> float:
        return message.departed + self._cost.occupancy(message.source, message.destination)
