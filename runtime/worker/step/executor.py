"""The executor: runs one rank's instruction list, and waits for nothing but the inputs of the current op.

The program is lowered: its SEND and RECV ops define where messages are sent and where receives are posted. The executor follows
them and decides nothing. A RECV posts a receive and a SEND sends a message; neither blocks. A compute op waits for its own
message only (rule 2).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec
from adaptra.profiled import named
from adaptra.program import Kind, Op, Program
from adaptra.runtime.devices.device_clock import Mark
from adaptra.runtime.injection.emulation import Pacing
from adaptra.runtime.injection.failures import Failures
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.worker.stages.stage import ForwardStage, Stage
from adaptra.runtime.worker.step.device_turns import DeviceTurns
from adaptra.runtime.worker.step.program_messages import ProgramMessages


@dataclass(slots=True)
class ExecutedStep:
    """What one step is given and what it has found; see :meth:`Executor.run`.

    Attributes:
        number: The step's number.
        inputs, targets, on_message, on_results, asks, on_asked: As the executor is given them.
        unasked: The other replicas of which it is not known whether they ask for outputs.
        results: The results of this rank's replica so far, per microbatch.
    """

    number: int
    inputs: Sequence[Sequence[Tensor]]
    targets: Sequence[Sequence[Tensor]]
    on_message: Callable[[int], None] | None
    on_results: Callable[[dict[int, tuple[Tensor, ...]]], None] | None
    asks: bool
    on_asked: Callable[[int], None] | None
    unasked: set[int]
    results: dict[int, tuple[Tensor, ...]] = field(default_factory=dict[int, tuple[Tensor, ...]])


class Executor:
    """Runs one rank's order of a lowered program, step after step.

    Args:
        program: A lowered program that :func:`adaptra.program.verify.verify` accepts.
        rank: This rank.
        stages: The stages of this rank by replica and index, as ops name them. They train, unless all compute ops are F.
        messages: The messages of its order.
        pacing: Lengthens ops on emulated devices and slowed stages.
        monitor: Records ops and messages.
        mark: The present time on this rank's device, as :meth:`adaptra.runtime.devices.device_clock.OpClock.mark`.
        turns: The turns of the workers of this process; None if there is one.
        failures: Has the worker fail as injected.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[tuple[int, int], ForwardStage],
        messages: ProgramMessages,
        pacing: Pacing,
        monitor: Monitor,
        mark: Callable[[], Mark],
        turns: DeviceTurns | None = None,
        failures: Failures | None = None,
    ) -> None:
        self.program = program
        self._order = program.orders[rank]
        self._rank = rank
        # Whoever gives a program with other ops than F gives stages that train.
        self._stages = cast("Mapping[tuple[int, int], Stage]", stages)
        self._home = program.routing.replica_of(rank)
        self._messages = messages
        self._at_end = [op for op in self._order if self._comes_home(op)]
        self._pacing = pacing
        self._monitor = monitor
        self._mark = mark
        self._turns = turns
        self._failures = failures
        self._last = program.stages - 1
        self._values: dict[Op, tuple[Tensor, ...]] = {}

    @property
    def receive_counts(self) -> dict[tuple[int, MessageSpec], int]:
        """The number of receive buffers that the program needs at a time, per source rank and message."""
        return self._messages.receive_counts

    def make_ready(self) -> None:
        """Have the transport make ready for the program's messages."""
        self._messages.make_ready()

    @property
    def heard(self) -> frozenset[int]:
        """The stages from which messages of this rank's replica come."""
        return self._messages.heard

    @torch.no_grad()
    def run(
        self,
        step: int,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Sequence[Tensor]],
        on_message: Callable[[int], None] | None = None,
        on_results: Callable[[dict[int, tuple[Tensor, ...]]], None] | None = None,
        *,
        asks: bool = False,
        on_asked: Callable[[int], None] | None = None,
    ) -> dict[int, tuple[Tensor, ...]]:
        """Run one step.

        Args:
            step: The step's number; part of every message's identity.
            inputs: The model's inputs per microbatch of this rank's replica; only used by the rank of the first stage.
            targets: The loss's targets per microbatch of this rank's replica; only used by the rank of the last stage.
            on_message: Called with the sending stage of a message as soon as an op uses it.
            on_results: Called on the rank of the last stage with the results as soon as they are complete.
            asks: Whether the user asks for the model's outputs on this rank, which has the last stage.
            on_asked: Called with each other replica that asks for outputs of microbatches which this rank computes, before
                these are computed.

        Returns:
            On the rank of the last stage, its results per microbatch; elsewhere nothing.

        Raises:
            TransportError: A message could not be exchanged; names its edge.
            Exception: An error of the user's model, with a note of rank, op and step.
        """
        others = set(range(self.program.replicas)) - {self._home}
        now = ExecutedStep(step, inputs, targets, on_message, on_results, asks, on_asked, others)
        self._begin()
        self._messages.begin_step(step)
        self._monitor.ready(self._mark())
        for op in self._order:
            try:
                self._execute(op, now)
            except Exception as error:
                error.add_note(f"in step {step}: rank {self._rank} at {op}")
                raise
        for receive in self._at_end:
            self._messages.use_at_end(receive, partial(self._end, now, receive))
        return now.results

    def _begin(self) -> None:
        """Begin a step, in executors that keep anything of it."""

    @property
    def _count(self) -> int:
        """The number of microbatches of each replica."""
        return self.program.microbatches

    def _execute(self, op: Op, now: ExecutedStep) -> None:
        stage, microbatch = op.stage, op.microbatch
        match op.kind:
            case Kind.F:
                self._forward(op, now)
            case Kind.I | Kind.B:
                grad_outputs = () if stage == self._last else self._take(op, +1, now)
                if op.kind is Kind.B:
                    self._take_over_sums(op)
                with self._timed(op, now.number) as started:
                    computing, of_stage = self._computing(op)
                    grad_inputs = computing.input_grad(of_stage, grad_outputs)
                    if op.kind is Kind.B:
                        self._weight_grad(op, now.number, started)
                if stage > 0:
                    self._values[_made_by(Kind.I, op, stage)] = grad_inputs
            case Kind.W:
                self._take_over_sums(op)
                with self._timed(op, now.number) as started:
                    self._weight_grad(op, now.number, started)
            case Kind.SEND_F | Kind.SEND_B | Kind.SEND_W | Kind.SEND_RESULT | Kind.SEND_SUM | Kind.SEND_BUFFERS:
                with named(op):
                    self._messages.send(op, self._sent(op))
            case Kind.SEND_INPUT:
                with named(op):
                    self._messages.send_inputs(op, now.inputs[microbatch])
            case Kind.SEND_TARGET:
                with named(op):
                    self._messages.send_targets(op, now.targets[microbatch], asks=now.asks)
            case Kind.RECV_F | Kind.RECV_B | Kind.RECV_W | Kind.RECV_INPUT | Kind.RECV_TARGET:
                self._messages.post(op)
            case Kind.RECV_RESULT | Kind.RECV_SUM | Kind.RECV_BUFFERS:
                self._messages.post(op)
            case Kind.REDUCE | Kind.STEP:
                pass  # the worker adds up gradients when its order has ended, and the user's optimizer makes the update

    def _forward(self, op: Op, now: ExecutedStep) -> None:
        inputs = self._inputs_of(op, now) if op.stage == 0 else self._take(op, -1, now)
        wanted = self._targets_of(op, now) if op.stage == self._last else ()
        buffers = self._messages.take_if_sent(Kind.RECV_BUFFERS, op)
        if buffers is not None:
            self._stages[op.replica, op.stage].take_over_buffers(buffers)
        with self._timed(op, now.number):
            stage, microbatch = self._computing(op)
            outputs = stage.forward(now.number, microbatch, inputs, wanted)
        if op.stage == self._last and op.replica == self._home:
            self._found(now, op.microbatch, outputs)
        else:
            self._values[op] = outputs

    def _computing(self, op: Op) -> tuple[Stage, int]:
        """Return the stage that computes an op, and the number of the op's microbatch in its replica."""
        return self._stages[op.replica, op.stage], op.microbatch

    def _sent(self, op: Op) -> tuple[Tensor, ...]:
        """Return what a send carries away."""
        if op.kind in (Kind.SEND_W, Kind.SEND_SUM):
            return self._stages[op.replica, op.stage].hand_over()
        if op.kind is Kind.SEND_BUFFERS:
            return self._stages[op.replica, op.stage].hand_over_buffers()
        return self._values.pop(_made_by(Kind.I if op.kind is Kind.SEND_B else Kind.F, op, op.stage))

    def _comes_home(self, op: Op) -> bool:
        """Return whether an op receives what no F, I or W of this rank needs."""
        is_behind = op.kind is Kind.RECV_BUFFERS and op.microbatch == self.program.microbatches
        return is_behind or op.kind in (Kind.RECV_RESULT, Kind.RECV_SUM)

    def _end(self, now: ExecutedStep, receive: Op, tensors: tuple[Tensor, ...]) -> None:
        """Take what a worker of another replica has computed for this rank."""
        if receive.kind is Kind.RECV_SUM:
            self._stages[receive.replica, receive.stage].take_over(tensors)
        elif receive.kind is Kind.RECV_BUFFERS:
            self._stages[receive.replica, receive.stage].take_over_buffers(tensors)
        else:
            self._found(now, receive.microbatch, tuple(one.clone() for one in tensors))

    def _weight_grad(self, op: Op, step: int, at: float) -> None:
        """Run W, or the W of a B. An emulated device computes its gradients one after the other too."""
        stage, microbatch = self._computing(op)
        stage.weight_grad(microbatch, lambda share: self._pacing.pad_part(op.stage, op.kind, step, at, share))

    @contextmanager
    def _timed(self, op: Op, step: int) -> Generator[float]:
        """Enclose an op's work on the device, which is measured, and yield when it began."""
        with nullcontext() if self._turns is None else self._turns.during(op):
            at, mark = time.monotonic(), self._mark()
            with named(op):
                yield at
            self._pacing.pad(op.stage, op.kind, step, at)
            if self._failures is not None and op.replica == self._home:
                self._failures.at(step, op)
            self._monitor.op(op, mark, self._mark())
        self._messages.release_after(op)

    def _take_over_sums(self, op: Op) -> None:
        """Wait for the sums of another worker, if that one has computed the microbatch before. The wait is no part of W."""
        sums = self._messages.take_if_sent(Kind.RECV_W, op)
        if sums is not None:
            self._stages[op.replica, op.stage].take_over(sums)

    def _inputs_of(self, op: Op, now: ExecutedStep) -> Sequence[Tensor]:
        """Return an F's inputs: of this rank's replica, or from another one."""
        sent = self._messages.take_inputs(op)
        return now.inputs[op.microbatch] if sent is None else sent

    def _targets_of(self, op: Op, now: ExecutedStep) -> Sequence[Tensor]:
        """Return an F's targets, once it is known whether another replica asks for outputs."""
        sent = self._messages.take_targets(op)
        if sent is None:
            return now.targets[op.microbatch]
        targets, asks = sent
        if op.replica in now.unasked:
            now.unasked.remove(op.replica)
            if now.on_asked is not None and asks:
                now.on_asked(op.replica)
        return targets

    def _found(self, now: ExecutedStep, microbatch: int, results: tuple[Tensor, ...]) -> None:
        """Take the results of a microbatch of this rank's replica."""
        now.results[microbatch] = results
        if now.on_results is not None and len(now.results) == self._count:
            now.on_results(now.results)

    def _take(self, op: Op, offset: int, now: ExecutedStep) -> tuple[Tensor, ...]:
        """Return the neighbouring stage's result for ``op``: from this rank if it was computed here, else from its message."""
        neighbour = op.stage + offset
        if self.program.holder(op.replica, neighbour, op.microbatch) == self._rank:
            return self._values.pop(_made_by(Kind.F if offset < 0 else Kind.I, op, neighbour))
        return self._messages.take(op, offset, now.on_message)


def _made_by(kind: Kind, op: Op, stage: int) -> Op:
    """Return the key of a value: the F or I of the op's microbatch on a stage. B counts as I."""
    return Op(stage, kind, op.microbatch, None, op.replica)
