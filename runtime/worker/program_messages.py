"""The messages of one rank's program: its sends and receives, and the buffers that received messages keep.

All of it follows from the lowered program and is worked out once. So the number of buffers and the last use of each message are
known before a step. It is also known after which message of a channel the next step's receives may be pre-posted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import RECEIVED_BY, RULE, SENT_BY, peer_stage
from adaptra.runtime.detection.monitor import Monitor
from adaptra.runtime.transports.base import PURPOSE_OF, Identity, Pending, Transport


@dataclass(frozen=True, slots=True)
class MessageShapes:
    """The tensors in the messages of one stage, by the kind of the SEND.

    Attributes:
        forward: Tensors the stage sends to the next one; empty on the last stage.
        backward: Gradients the stage sends to the previous one; empty on the first stage.
    """

    forward: MessageSpec
    backward: MessageSpec


class ProgramMessages:
    """Posts the receives of one rank's order, sends its messages, and keeps received ones until their last use.

    Args:
        program: A lowered program.
        rank: This rank.
        shapes: The messages of every stage of the pipeline, by stage index.
        transport: Carries the messages.
        monitor: Records waits and messages.
        timeout: Seconds an op waits for a message before the step fails.

    Attributes:
        receive_counts: The number of receive buffers that the program needs at a time, per source rank and message.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        shapes: Sequence[MessageShapes],
        transport: Transport,
        monitor: Monitor,
        timeout: float,
    ) -> None:
        order = program.orders[rank]
        self._program = program
        self._rank = rank
        self._shapes = shapes
        self._transport = transport
        self._monitor = monitor
        self._timeout = timeout
        self._step = -1
        self._last_uses = frozenset((Kind.F,) if program.is_forward_only else (Kind.W, Kind.B))
        self._receives: dict[Op, Pending] = {}
        self._kept: dict[tuple[int | None, int, int], list[Pending]] = {}
        self._preposted_after = self._preposting(order)
        self.receive_counts = self._receive_counts(order)

    def begin_step(self, step: int) -> None:
        """Name the messages from now on by this step."""
        self._step = step

    def post(self, op: Op) -> None:
        """Post the receive of a RECV."""
        source, sent = peer_stage(op), SENT_BY[op.kind]
        self._receives[op] = self._transport.receive(self._peer(op, source), self._identity(op, sent, source, op.stage))

    def send(self, op: Op, tensors: tuple[Tensor, ...]) -> None:
        """Send the message of a SEND."""
        destination = peer_stage(op)
        identity = self._identity(op, op.kind, op.stage, destination)
        self._transport.send(self._peer(op, destination), identity, tensors)

    def take(self, op: Op, offset: int) -> tuple[Tensor, ...]:
        """Wait for the message from the stage at this offset that a compute op needs, and return its tensors.

        Raises:
            TransportError: It could not be exchanged, or not within the timeout.
        """
        receive = Op(op.stage, RECEIVED_BY[offset], op.microbatch, None, op.replica)
        pending = self._receives.pop(receive)
        asked = time.monotonic()
        tensors = pending.wait(self._timeout)
        now = time.monotonic()
        self._monitor.wait(op, now - asked)
        self._monitor.message(
            SENT_BY[receive.kind],
            op.stage + offset,
            op.stage,
            op.microbatch,
            sum(spec.travelling_bytes for spec in pending.identity.specs),
            pending.sent_at,
            pending.departed_at,
            pending.arrived_at,
            now,
        )
        self._kept.setdefault((op.replica, op.stage, op.microbatch), []).append(pending)
        if (ahead := self._preposted_after.get(receive)) is not None:
            self._transport.stand_by(self._peer(op, op.stage + offset), pending.identity, ahead)
        return tensors

    def release_after(self, op: Op) -> None:
        """Release the messages that the op's stage received for its microbatch, if the op was their last use."""
        if op.kind in self._last_uses:
            for pending in self._kept.pop((op.replica, op.stage, op.microbatch), ()):
                self._transport.release(pending)

    def _receive_counts(self, order: Sequence[Op]) -> dict[tuple[int, MessageSpec], int]:
        kept: Counter[tuple[int, MessageSpec]] = Counter()
        most: Counter[tuple[int, MessageSpec]] = Counter()
        by_microbatch: dict[tuple[int | None, int, int], list[tuple[int, MessageSpec]]] = {}
        for op in order:
            if op.kind in SENT_BY:
                source = peer_stage(op)
                key = (self._peer(op, source), self._spec(SENT_BY[op.kind], source))
                kept[key] += 1
                most[key] = max(most[key], kept[key])
                by_microbatch.setdefault((op.replica, op.stage, op.microbatch), []).append(key)
            elif op.kind in self._last_uses:
                kept.subtract(by_microbatch.pop((op.replica, op.stage, op.microbatch), ()))
        return dict(most)

    def _preposting(self, order: Sequence[Op]) -> dict[Op, int]:
        """Return for the last message of each channel the number of receives that the order posts before its first op."""
        begin = takewhile(lambda op: not op.kind.is_compute, order)
        ahead = Counter(self._channel_of(op) for op in begin if op.kind in SENT_BY)
        last = {self._channel_of(receive): receive for receive in self._taken_by(order)}
        return {receive: ahead[channel] for channel, receive in last.items()}

    def _taken_by(self, order: Sequence[Op]) -> Iterator[Op]:
        """Yield the RECV of each message in the order in which the compute ops take them."""
        for op in order:
            for offset, _, _ in RULE[op.kind] if op.kind.is_compute else ():
                source = op.stage + offset
                if 0 <= source < self._program.stages and self._peer(op, source) != self._rank:
                    yield Op(op.stage, RECEIVED_BY[offset], op.microbatch, None, op.replica)

    def _channel_of(self, receive: Op) -> tuple[int, Kind]:
        return self._peer(receive, peer_stage(receive)), SENT_BY[receive.kind]

    def _peer(self, op: Op, stage: int) -> int:
        """Return the rank that computes the op's microbatch on a stage."""
        return self._program.holder(op.replica, stage, op.microbatch)

    def _identity(self, op: Op, sent: Kind, source: int, destination: int) -> Identity:
        spec = self._spec(sent, source)
        return Identity(self._step, PURPOSE_OF[sent], source, destination, op.microbatch, spec, op.replica or 0)

    def _spec(self, sent: Kind, source: int) -> MessageSpec:
        shapes = self._shapes[source]
        return shapes.forward if sent is Kind.SEND_F else shapes.backward
