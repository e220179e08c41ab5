"""The messages of one rank's program: its sends and receives, and the buffers that received messages keep.

All of it follows from the lowered program and is worked out once. So the number of buffers and the last use of each message are
known before a step. It is also known after which message of a channel the next step's receives may be pre-posted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Final

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import INPUT_GRADIENT, RECEIVED_BY, RULE, SENT_BY, other_end, peer_stage
from adaptra.runtime.devices.device_clock import Mark
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.step_messages.stride_numbers import StrideNumbers
from adaptra.runtime.transports.base import PURPOSE_OF, Identity, LaneTraffic, MessageLayout, Pending, Transport, layout_of

_ASKED: Final = TensorSpec((1,), torch.uint8, stays_on_host=True)
"""Says beside the targets whether a replica asks for outputs."""


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """The tensors of one microbatch.

    Attributes:
        inputs: The model's inputs, as the first stage takes them, and their strides.
        targets: The loss's targets, as the last stage takes them, and their strides.
        results: What the last stage returns.
    """

    inputs: StrideNumbers
    targets: StrideNumbers
    results: MessageSpec


@dataclass(frozen=True, slots=True)
class MessageShapes:
    """The tensors in the messages of one stage, by the kind of the SEND.

    Attributes:
        forward: Tensors the stage sends to the next one; empty on the last stage.
        backward: Gradients the stage sends to the previous one; empty on the first stage.
        weights: The sums of the stage's weight gradients, which workers hand over.
        buffers: The buffers that the stage changes, which workers hand over too.
        larger: The number of first microbatches that have one row more than the others; None if all have the same.
        smaller: ``forward`` and ``backward`` of the others.
    """

    forward: MessageSpec
    backward: MessageSpec
    weights: MessageSpec = ()
    buffers: MessageSpec = ()
    larger: int | None = None
    smaller: tuple[MessageSpec, MessageSpec] = ((), ())

    def of(self, microbatch: int) -> tuple[MessageSpec, MessageSpec]:
        """Return ``forward`` and ``backward`` of a microbatch."""
        return (self.forward, self.backward) if self.larger is None or microbatch < self.larger else self.smaller


class ProgramMessages:
    """Posts the receives of one rank's order, sends its messages, and keeps received ones until their last use.

    Args:
        program: A lowered program.
        shapes: The messages of every stage of the pipeline, by stage index.
        batch: The tensors of a microbatch's inputs, targets and results.
        transport: Carries the messages of its rank.
        monitor: Records waits and messages.
        timeout: Seconds an op waits for a message before the step fails.
        mark: The present time on this rank's device, as :meth:`adaptra.runtime.devices.device_clock.OpClock.mark`.
        shape: The code of the batch's shape, which both sides of a message compare.
        ends_early: Whether the last messages of the program may be left out, so that none tells of the next step's.

    Attributes:
        heard: The stages from which messages of this rank's replica come.
        receive_counts: The number of receive buffers that the program needs at a time, per source rank and message.
    """

    def __init__(
        self,
        program: Program,
        shapes: Sequence[MessageShapes],
        batch: BatchShapes,
        transport: Transport,
        monitor: Monitor,
        timeout: float,
        mark: Callable[[], Mark],
        shape: int = 0,
        *,
        ends_early: bool = False,
    ) -> None:
        order = program.orders[transport.rank]
        self._program = program
        self._shapes = shapes
        self._batch = batch
        self._transport = transport
        self._monitor = monitor
        self._timeout = timeout
        self._mark = mark
        self._shape = shape
        self._step = -1
        self._last_uses = frozenset((Kind.F,) if program.is_forward_only else (Kind.W, Kind.B))
        self._receives: dict[Op, Pending] = {}
        self._kept: dict[tuple[int, int, int], list[Pending]] = {}
        self.heard = frozenset(peer_stage(receive) for receive in self._taken_by(order) if self._is_at_home(receive))
        self._preposted_after = {} if ends_early else self._preposting(order)
        self.receive_counts = self._receive_counts(order)

    def make_ready(self) -> None:
        """Have the transport do ahead what the first messages of each lane would wait for."""
        sent: dict[str | None, Counter[MessageSpec]] = {}
        received: dict[str | None, dict[tuple[int, MessageSpec], int]] = {}
        under_way: Counter[tuple[int, Kind, MessageSpec]] = Counter()
        for op in self._program.orders[self._transport.rank]:
            if op.kind in SENT_BY:
                key = self._buffer_of(op)
                received.setdefault(op.lane, {})[key] = self.receive_counts[key]
            elif op.kind in (Kind.SEND_F, Kind.SEND_B):
                edge = self._program.rank_of(other_end(op)), op.kind, self._spec(op)
                if under_way[edge] < self._most_under_way(op):
                    under_way[edge] += 1
                    sent.setdefault(op.lane, Counter())[edge[-1]] += 1
        for lane in sent.keys() | received.keys():
            self._transport.prepare(LaneTraffic(sent.get(lane, {}), received.get(lane, {}), lane))

    def _most_under_way(self, sent: Op) -> int:
        """Return the most messages of an edge, either way, that are under way: their microbatches are held before it."""
        earlier = min(sent, other_end(sent), key=lambda end: end.stage)
        return self._in_flight[self._program.rank_of(earlier), earlier.stage]

    @cached_property
    def _in_flight(self) -> dict[tuple[int, int], int]:
        """The most microbatches between their F and their input gradient, by rank and stage."""
        held: Counter[tuple[int, int]] = Counter()
        most: dict[tuple[int, int], int] = {}
        for rank, order in enumerate(self._program.orders):
            for op in order:
                held[rank, op.stage] += (op.kind is Kind.F) - (op.kind in INPUT_GRADIENT)
                most[rank, op.stage] = max(most.get((rank, op.stage), 0), held[rank, op.stage])
        return most

    def begin_step(self, step: int) -> None:
        """Name the messages from now on by this step."""
        self._step = step

    def post(self, op: Op) -> None:
        """Post the receive of a RECV."""
        sent = other_end(op)
        self._receives[op] = self._transport.receive(self._program.rank_of(sent), self._identity(sent, op))

    def send(self, op: Op, tensors: tuple[Tensor, ...]) -> None:
        """Send the message of a SEND."""
        received = other_end(op)
        self._transport.send(self._program.rank_of(received), self._identity(op, received), tensors)

    def send_inputs(self, op: Op, inputs: Sequence[Tensor]) -> None:
        """Send the inputs of a microbatch."""
        self.send(op, self._batch.inputs.beside(inputs))

    def send_targets(self, op: Op, targets: Sequence[Tensor], *, asks: bool) -> None:
        """Send the targets of a microbatch, and whether its replica asks for outputs."""
        device = targets[0].device if targets else None  # kernels pack what lies together
        self.send(op, (*self._batch.targets.beside(targets), torch.full((1,), asks, dtype=torch.uint8, device=device)))

    def take_inputs(self, op: Op) -> tuple[Tensor, ...] | None:
        """Return what :meth:`send_inputs` has sent for an F, with its strides; None if its inputs are here."""
        sent = self.take_if_sent(Kind.RECV_INPUT, op)
        return None if sent is None else self._batch.inputs.restore(sent)

    def take_targets(self, op: Op) -> tuple[tuple[Tensor, ...], bool] | None:
        """Return what :meth:`send_targets` has sent for an F, with its strides; None if its targets are here."""
        sent = self.take_if_sent(Kind.RECV_TARGET, op)
        return None if sent is None else (self._batch.targets.restore(sent[:-1]), bool(sent[-1]))

    def take(self, op: Op, offset: int, on_message: Callable[[int], None] | None = None) -> tuple[Tensor, ...]:
        """Wait for the message from the stage at this offset that a compute op needs, and return its tensors.

        Args:
            op: The compute op.
            offset: The sending stage relative to the op's.
            on_message: Called with the sending stage of a message between two workers of one replica.

        Raises:
            TransportError: It could not be exchanged, or not within the timeout.
        """
        receive = Op(op.stage, RECEIVED_BY[offset], op.microbatch, None, op.replica)
        asked = self._mark()
        pending, tensors, consumed = self._arrived(receive)
        if self._is_at_home(receive):  # other links are not measured as edges of the replica
            self._monitor.wait(op, asked, consumed)
            if on_message is not None:
                on_message(op.stage + offset)
        self._keep(op, pending)
        if (ahead := self._preposted_after.get(receive)) is not None:
            self._transport.stand_by(self._program.rank_of(other_end(receive)), pending.identity, ahead)
        return tensors

    def _arrived(self, receive: Op) -> tuple[Pending, tuple[Tensor, ...], Mark]:
        """Wait for a message and record it. Return it, its tensors and when the device could use them."""
        pending, sent = self._receives.pop(receive), other_end(receive)
        tensors = pending.wait(self._timeout)
        consumed = self._mark()
        self._monitor.message(
            sent.kind,
            sent.stage,
            receive.stage,
            sent.microbatch,
            sum(spec.travelling_bytes for spec in pending.identity.specs),
            pending.sent_at,
            pending.departed_at,
            pending.arrived_at,
            consumed,
            None if self._is_at_home(receive) else sent.replica,
        )
        return pending, tensors, consumed

    def _is_at_home(self, receive: Op) -> bool:
        """Return whether a message goes between two workers of its microbatch's replica, as all do in one pipeline."""
        if self._program.is_one_pipeline:
            return True
        home_of = self._program.routing.replica_of
        return all(
            home_of(worker) == receive.replica for worker in (self._transport.rank, self._program.rank_of(other_end(receive)))
        )

    def take_if_sent(self, kind: Kind, op: Op) -> tuple[Tensor, ...] | None:
        """Wait for what a RECV of this kind brings for a compute op, or return None if its program has no such RECV.

        Raises:
            TransportError: It could not be exchanged, or not within the timeout.
        """
        receive = Op(op.stage, kind, op.microbatch, None, op.replica)
        if receive not in self._receives:
            return None
        pending, tensors, _ = self._arrived(receive)
        self._keep(op, pending)
        return tensors

    def use_at_end(self, receive: Op, use: Callable[[tuple[Tensor, ...]], None]) -> None:
        """Wait for a message that no compute op of this rank needs, use its tensors, and release them.

        Raises:
            TransportError: It could not be exchanged, or not within the timeout.
        """
        pending, tensors, _ = self._arrived(receive)
        use(tensors)
        self._transport.release(pending)

    def _keep(self, op: Op, pending: Pending) -> None:
        self._kept.setdefault((op.replica, op.stage, op.microbatch), []).append(pending)

    def release_after(self, op: Op) -> None:
        """Release the messages that the op's stage received for its microbatch, if the op was their last use."""
        if op.kind in self._last_uses:
            for pending in self._kept.pop((op.replica, op.stage, op.microbatch), ()):
                self._transport.release(pending)

    def _receive_counts(self, order: Sequence[Op]) -> dict[tuple[int, MessageSpec], int]:
        """Return the most receive buffers in use at a time.

        Receives that are posted ahead have buffers, too. They are counted where another channel from the same rank has messages
        of this layout, and could find none left. A channel alone uses its own again.
        """
        ahead = self._ahead(order)
        standing = dict.fromkeys(ahead, 0)
        kept: Counter[tuple[int, MessageSpec]] = Counter()
        most: Counter[tuple[int, MessageSpec]] = Counter()
        by_microbatch: dict[tuple[int, int, int], list[tuple[int, MessageSpec]]] = {}

        def use(key: tuple[int, MessageSpec], count: int) -> None:
            kept[key] += count
            most[key] = max(most[key], kept[key])

        def stand(channel: tuple[int, Kind]) -> None:
            key, count = ahead[channel]
            use(key, count - standing[channel])
            standing[channel] = count

        for channel in ahead:
            stand(channel)  # since the step before
        for op in order:
            if op.kind in SENT_BY:
                key, channel = self._buffer_of(op), self._channel_of(op)
                if standing.get(channel) and layout_of(ahead[channel][0][1]) == layout_of(key[1]):
                    standing[channel] -= 1
                    kept[ahead[channel][0]] -= 1
                use(key, 1)
                by_microbatch.setdefault((op.replica, op.stage, op.microbatch), []).append(key)
                continue
            for receive in self._taken_by([op]):
                if receive in self._preposted_after and self._channel_of(receive) in ahead:
                    stand(self._channel_of(receive))
            if op.kind in self._last_uses:
                kept.subtract(by_microbatch.pop((op.replica, op.stage, op.microbatch), ()))
        return dict(most)

    def _ahead(self, order: Sequence[Op]) -> dict[tuple[int, Kind], tuple[tuple[int, MessageSpec], int]]:
        """Return the buffer and the number of receives that are posted ahead, for channels that share a layout with another."""
        channels: dict[tuple[int, MessageLayout], set[Kind]] = {}
        for op in order:
            if op.kind in SENT_BY:
                source, specs = self._buffer_of(op)
                channels.setdefault((source, layout_of(specs)), set()).add(self._channel_of(op)[1])
        buffers = {receive: self._buffer_of(receive) for receive, count in self._preposted_after.items() if count}
        return {
            self._channel_of(receive): (key, self._preposted_after[receive])
            for receive, key in buffers.items()
            if len(channels[key[0], layout_of(key[1])]) > 1
        }

    def _buffer_of(self, receive: Op) -> tuple[int, MessageSpec]:
        sent = other_end(receive)
        return self._program.rank_of(sent), self._spec(sent)

    def _preposting(self, order: Sequence[Op]) -> dict[Op, int]:
        """Return for the last message of each channel the number of receives that the order posts before its first op."""
        begin = takewhile(lambda op: not op.kind.is_compute, order)
        ahead = Counter(self._channel_of(op) for op in begin if op.kind in SENT_BY)
        last = {self._channel_of(receive): receive for receive in self._taken_by(order)}
        return {receive: ahead[channel] for channel, receive in last.items()}

    def _taken_by(self, order: Sequence[Op]) -> Iterator[Op]:
        """Yield the RECV of each message in the order in which the compute ops take them."""
        for op in order:
            for offset, *_ in RULE[op.kind] if op.kind.is_compute else ():
                if offset == 0 or not 0 <= op.stage + offset < self._program.stages:
                    continue
                receive = Op(op.stage, RECEIVED_BY[offset], op.microbatch, None, op.replica)
                if self._program.rank_of(other_end(receive)) != self._transport.rank:
                    yield receive

    def _channel_of(self, receive: Op) -> tuple[int, Kind]:
        sent = other_end(receive)
        return self._program.rank_of(sent), sent.kind

    def _identity(self, sent: Op, received: Op) -> Identity:
        purpose, spec = PURPOSE_OF[sent.kind], self._spec(sent)
        ends = sent.stage, received.stage
        return Identity(self._step, purpose, *ends, sent.microbatch, spec, sent.replica, self._shape)

    def _spec(self, sent: Op) -> MessageSpec:
        shapes = self._shapes[sent.stage]
        match sent.kind:
            case Kind.SEND_F | Kind.SEND_B:
                return shapes.of(sent.microbatch)[sent.kind is Kind.SEND_B]
            case Kind.SEND_INPUT:
                return self._batch.inputs.specs
            case Kind.SEND_TARGET:
                return (*self._batch.targets.specs, _ASKED)
            case Kind.SEND_RESULT:
                return self._batch.results
            case Kind.SEND_BUFFERS:
                return shapes.buffers
            case _:
                return shapes.weights
