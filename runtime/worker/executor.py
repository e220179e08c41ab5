"""The executor: runs one rank's instruction list, and waits for nothing but the inputs of the current op.

The program is lowered: its SEND and RECV ops define where messages are sent and where receives are posted. The executor follows
them and decides nothing. A RECV posts a receive and a SEND sends a message; neither blocks. A compute op waits for its own
message only (rule 2).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import RECEIVED_BY, SENT_BY, peer_stage
from adaptra.runtime.detection.monitor import Monitor
from adaptra.runtime.injection.emulation import Pacing
from adaptra.runtime.transports.base import PURPOSE_OF, Identity, Pending, Transport
from adaptra.runtime.worker.device_clock import Mark
from adaptra.runtime.worker.stage import Stage


@dataclass(frozen=True, slots=True)
class MessageShapes:
    """The tensors in the messages of one stage, by the kind of the SEND.

    Attributes:
        forward: Tensors the stage sends to the next one; empty on the last stage.
        backward: Gradients the stage sends to the previous one; empty on the first stage.
    """

    forward: MessageSpec
    backward: MessageSpec


class Executor:
    """Runs one rank's order of a lowered program, step after step.

    Args:
        program: A lowered program that :func:`adaptra.program.verify.verify` accepts.
        rank: This rank.
        stages: The stages of this rank by index.
        messages: The messages of every stage of the pipeline, by stage index.
        transport: Carries the messages; its receive buffers are reserved here, sized by the program.
        pacing: Lengthens ops on emulated devices and slowed stages.
        monitor: Records ops and messages.
        mark: The present time on this rank's device, as :meth:`adaptra.runtime.worker.device_clock.OpClock.mark`.
        timeout: Seconds an op waits for a message before the step fails.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        messages: Sequence[MessageShapes],
        transport: Transport,
        pacing: Pacing,
        monitor: Monitor,
        mark: Callable[[], Mark],
        timeout: float,
    ) -> None:
        self.program = program
        self._order = program.orders[rank]
        self._rank = rank
        self._stages = stages
        self._messages = messages
        self._transport = transport
        self._pacing = pacing
        self._monitor = monitor
        self._mark = mark
        self._timeout = timeout
        self._last = program.stages - 1
        self._forward_only = program.is_forward_only
        self._step = -1
        self._on_message: Callable[[int], None] | None = None
        self._on_results: Callable[[dict[int, tuple[Tensor, ...]]], None] | None = None
        self._results: dict[int, tuple[Tensor, ...]] = {}
        self._values: dict[tuple[int, Kind, int], tuple[Tensor, ...]] = {}
        self._receives: dict[Op, Pending] = {}
        self._held: dict[tuple[int, int], list[Pending]] = {}
        self._ahead = self._posted_ahead()
        self._incoming = Counter(self._channel_of(op) for op in self._order if op.kind in SENT_BY)
        self._to_come: Counter[tuple[int, Kind]] = Counter()
        self.receive_counts = self._receive_counts()
        """The number of receive buffers that the program needs at a time, per source rank and message."""

    def _receive_counts(self) -> dict[tuple[int, MessageSpec], int]:
        held: Counter[tuple[int, MessageSpec]] = Counter()
        most: Counter[tuple[int, MessageSpec]] = Counter()
        by_microbatch: dict[tuple[int, int], list[tuple[int, MessageSpec]]] = {}
        for op in self._order:
            if op.kind in SENT_BY:
                source = peer_stage(op)
                key = (self.program.placement[source], self._spec(SENT_BY[op.kind], source))
                held[key] += 1
                most[key] = max(most[key], held[key])
                by_microbatch.setdefault((op.stage, op.microbatch), []).append(key)
            elif self._is_last_use(op):
                held.subtract(by_microbatch.pop((op.stage, op.microbatch), ()))
        return dict(most)

    def _posted_ahead(self) -> Counter[tuple[int, Kind]]:
        """Return the number of receives posted before the first op, per source rank and kind of message."""
        begin = takewhile(lambda op: not op.kind.is_compute, self._order)
        return Counter(self._channel_of(op) for op in begin if op.kind in SENT_BY)

    def _channel_of(self, receive: Op) -> tuple[int, Kind]:
        return self.program.placement[peer_stage(receive)], SENT_BY[receive.kind]

    def _is_last_use(self, op: Op) -> bool:
        """Return True if the messages that the op's stage received for its microbatch are no longer needed after the op."""
        match op.kind:
            case Kind.W | Kind.B:
                return True
            case Kind.F:
                return self._forward_only
            case Kind.I | Kind.SEND_F | Kind.RECV_F | Kind.SEND_B | Kind.RECV_B:
                return False

    def _spec(self, sent: Kind, source: int) -> MessageSpec:
        shapes = self._messages[source]
        return shapes.forward if sent is Kind.SEND_F else shapes.backward

    @torch.no_grad()
    def run(
        self,
        step: int,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Sequence[Tensor]],
        on_message: Callable[[int], None] | None = None,
        on_results: Callable[[dict[int, tuple[Tensor, ...]]], None] | None = None,
    ) -> dict[int, tuple[Tensor, ...]]:
        """Run one step.

        Args:
            step: The step's number; part of every message's identity.
            inputs: The model's inputs per microbatch; only used by the rank of the first stage.
            targets: The loss's targets per microbatch; only used by the rank of the last stage.
            on_message: Called with the sending stage of a message as soon as an op uses it.
            on_results: Called on the rank of the last stage with the results as soon as they are complete.

        Returns:
            On the rank of the last stage, its results per microbatch; elsewhere nothing.

        Raises:
            TransportError: A message could not be exchanged; names its edge.
            Exception: An error of the user's model, with a note of rank, op and step.
        """
        self._step = step
        self._on_message = on_message
        self._on_results = on_results
        self._results = {}
        self._to_come = self._incoming.copy()
        for op in self._order:
            try:
                self._execute(op, inputs, targets)
            except Exception as error:
                error.add_note(f"in step {step}: rank {self._rank} at {op}")
                raise
        return self._results

    def _execute(self, op: Op, inputs: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]]) -> None:
        stage, microbatch = op.stage, op.microbatch
        match op.kind:
            case Kind.F:
                given = inputs[microbatch] if stage == 0 else self._take(op, -1)
                wanted = targets[microbatch] if stage == self._last else ()
                started = time.monotonic(), self._mark()
                outputs = self._stages[stage].forward(self._step, microbatch, given, wanted)
                self._finish(op, started)
                if stage == self._last:
                    self._results[microbatch] = outputs
                    if self._on_results is not None and len(self._results) == self.program.microbatches:
                        self._on_results(self._results)
                else:
                    self._values[stage, Kind.F, microbatch] = outputs
            case Kind.I | Kind.B:
                grad_outputs = () if stage == self._last else self._take(op, +1)
                started = time.monotonic(), self._mark()
                grad_inputs = self._stages[stage].input_grad(microbatch, grad_outputs)
                if op.kind is Kind.B:
                    self._stages[stage].weight_grad(microbatch)
                self._finish(op, started)
                if stage > 0:
                    self._values[stage, Kind.I, microbatch] = grad_inputs
            case Kind.W:
                started = time.monotonic(), self._mark()
                self._stages[stage].weight_grad(microbatch)
                self._finish(op, started)
            case Kind.SEND_F:
                self._send(op, self._values.pop((stage, Kind.F, microbatch)))
            case Kind.SEND_B:
                self._send(op, self._values.pop((stage, Kind.I, microbatch)))
            case Kind.RECV_F | Kind.RECV_B:
                self._receive(op)

    def _finish(self, op: Op, started: tuple[float, Mark]) -> None:
        at, mark = started
        self._pacing.pad(op.stage, op.kind, self._step, at)
        self._monitor.op(op, mark, self._mark())
        if self._is_last_use(op):
            for pending in self._held.pop((op.stage, op.microbatch), ()):
                self._transport.release(pending)

    def _take(self, op: Op, offset: int) -> tuple[Tensor, ...]:
        """Return the neighbouring stage's result for ``op``: from this rank if the stage is here, else from its message."""
        neighbour = op.stage + offset
        if neighbour in self._stages:
            return self._values.pop((neighbour, Kind.F if offset < 0 else Kind.I, op.microbatch))
        receive = Op(op.stage, RECEIVED_BY[offset], op.microbatch)
        pending = self._receives.pop(receive)
        asked = time.monotonic()
        tensors = pending.wait(self._timeout)
        now = time.monotonic()
        self._monitor.wait(op, now - asked)
        self._monitor.message(
            SENT_BY[receive.kind],
            neighbour,
            op.stage,
            op.microbatch,
            sum(spec.travelling_bytes for spec in pending.identity.specs),
            pending.sent_at,
            pending.departed_at,
            pending.arrived_at,
            now,
        )
        self._held.setdefault((op.stage, op.microbatch), []).append(pending)
        channel = self._channel_of(receive)
        self._to_come[channel] -= 1
        if not self._to_come[channel]:
            self._transport.stand_by(channel[0], pending.identity, self._ahead[channel])
        if self._on_message is not None:
            self._on_message(neighbour)
        return tensors

    def _send(self, op: Op, tensors: tuple[Tensor, ...]) -> None:
        destination = peer_stage(op)
        spec = self._spec(op.kind, op.stage)
        identity = Identity(self._step, PURPOSE_OF[op.kind], op.stage, destination, op.microbatch, spec)
        self._transport.send(self.program.placement[destination], identity, tensors)

    def _receive(self, op: Op) -> None:
        source, sent = peer_stage(op), SENT_BY[op.kind]
        identity = Identity(self._step, PURPOSE_OF[sent], source, op.stage, op.microbatch, self._spec(sent, source))
        self._receives[op] = self._transport.receive(self.program.placement[source], identity)
