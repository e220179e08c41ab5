"""Stages that double numbers, two of them in a program, and an executor for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adaptra.graph.ops.specs import TensorSpec
from adaptra.program import Program
from adaptra.program.verify import verify
from adaptra.runtime.injection.emulation import Pacing
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.step_messages.stride_numbers import StrideNumbers
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.worker.step.executor import Executor
from adaptra.runtime.worker.step.program_messages import BatchShapes, MessageShapes, ProgramMessages

SPEC = (TensorSpec((1,), torch.float32),)
SHAPES = MessageShapes(SPEC, SPEC, SPEC)
WITH_BUFFERS = MessageShapes(SPEC, SPEC, SPEC, SPEC)
SOON = 20.0
"""Seconds that something which must happen may take."""

PAIR = """
schedule pair placement=0,1 microbatches=2
0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0I0 0W0 0I1 0W1
1: 1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1I1 1SEND_B1 1W1
"""


class Doubling:
    """A stage that doubles: F its input, I its gradient; W takes input × gradient, as the stage's weight is a factor of 2.

    Its buffer is halved by each F, and the input is added to it.
    """

    def __init__(self, last: bool = False, fail_at: str = "") -> None:
        self.ran: list[str] = []
        self.weight_gradients: list[float] = []
        self._last = last
        self._fail_at = fail_at
        self._saved: dict[int, tuple[Tensor, ...]] = {}
        self.sum: Tensor | None = None
        self.buffer = torch.ones(1)
        self._changed = threading.Condition()

    def begin_step(self, loss_scale: float, steps_before: int = 0, outputs: object = None) -> None:
        """Nothing depends on the step."""

    def forward(self, step: int, microbatch: int, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._run(f"F{microbatch}")
        self._saved[microbatch] = tuple(inputs)
        self.buffer = self.buffer / 2 + inputs[0]
        return tuple(2 * one + sum(targets) for one in inputs)

    def input_grad(self, microbatch: int, grad_outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._run(f"I{microbatch}")
        gradients = tuple(grad_outputs) if not self._last else (torch.ones_like(self._saved[microbatch][0]),)
        (given,), (gradient,) = self._saved[microbatch], gradients
        self._saved[microbatch] = (given, gradient)
        return (2 * gradient,)

    def weight_grad(self, microbatch: int, computed: Callable[[float], None]) -> None:
        self._run(f"W{microbatch}")
        given, gradient = self._saved.pop(microbatch)
        self.weight_gradients.append((given * gradient).item())
        self.sum = given * gradient if self.sum is None else self.sum + given * gradient

    def hand_over(self) -> tuple[Tensor, ...]:
        assert self.sum is not None, "a W has run"
        return (self.sum,)

    def take_over(self, sums: Sequence[Tensor]) -> None:
        (self.sum,) = (one.clone() for one in sums)

    def hand_over_buffers(self) -> tuple[Tensor, ...]:
        return (self.buffer,)

    def take_over_buffers(self, values: Sequence[Tensor]) -> None:
        (self.buffer,) = (one.clone() for one in values)

    def has_run(self, op: str) -> bool:
        """Wait until it has."""
        with self._changed:
            return self._changed.wait_for(lambda: op in self.ran, SOON)

    def _run(self, op: str) -> None:
        if op == self._fail_at:
            raise ZeroDivisionError("division by zero in the user's model")
        with self._changed:
            self.ran.append(op)
            self._changed.notify_all()


def executor_of(
    program: Program, rank: int, transport: Transport, stages: dict[int, Doubling], timeout: float = SOON
) -> Executor:
    """A rank's executor in one pipeline, with its transport's buffers reserved."""
    return routed_executor(program, rank, transport, {(0, stage): one for stage, one in stages.items()}, timeout)


def routed_executor(
    program: Program,
    rank: int,
    transport: Transport,
    stages: dict[tuple[int, int], Doubling],
    timeout: float = SOON,
    shapes: MessageShapes = SHAPES,
    monitor: Monitor | None = None,
) -> Executor:
    """A rank's executor, whose stages are those of several replicas, with its transport's buffers reserved."""
    monitor = monitor or Monitor(rank, program.placement)
    batch_shapes = BatchShapes(StrideNumbers(SPEC), StrideNumbers(SPEC), SPEC)
    messages = ProgramMessages(program, [shapes] * program.stages, batch_shapes, transport, monitor, timeout, time.monotonic)
    executor = Executor(program, rank, stages, messages, Pacing(None, ()), monitor, time.monotonic)
    transport.reserve(executor.receive_counts)
    return executor


def lowered(text: str) -> Program:
    """A verified program that has its communication already."""
    program = Program.parse(text)
    verify(program, ordered_channels=False)
    return program


def batch(count: int) -> list[tuple[Tensor]]:
    """1, 2, 3 … as the microbatches' inputs."""
    return [(torch.tensor([float(microbatch + 1)]),) for microbatch in range(count)]
