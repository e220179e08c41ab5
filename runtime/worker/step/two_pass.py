"""A step in two phases: the forward pass of all microbatches, and later, when gradients come from outside, the backward pass.

It runs a function that returns no loss. Anything may happen between the two phases, including other forwards. The caller keeps
the state that a forward pass saves for its backward pass, and gives it back or drops it.

Both phases are halves of one program (:func:`adaptra.program.schedules.two_phases`). A delay costs each phase its latency once,
under every order, so no new plan is needed when delays change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from adaptra.graph import CompiledStages
from adaptra.graph.ops.specs import MessageSpec
from adaptra.program import Kind, Program
from adaptra.runtime.step_messages.broadcast import Broadcast
from adaptra.runtime.step_messages.shared_gradients import Gradients
from adaptra.runtime.transports.base import Purpose
from adaptra.runtime.worker.ends.step_end import Certificate, StepEnd
from adaptra.runtime.worker.stages.loss_reduction import Reduction, RootGradient
from adaptra.runtime.worker.stages.stage import Stage, TwoPassStage
from adaptra.runtime.worker.step.executor import Executor
from adaptra.runtime.worker.step.rank_context import RankContext

_FORWARD: Final = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F})
_BACKWARD: Final = frozenset(Kind) - _FORWARD


@dataclass(slots=True)
class PendingBackward:
    """The state that a forward pass leaves on one rank for its backward pass.

    Attributes:
        step: The number of the call; random numbers are a function of it.
        saved: Per microbatch, the values that I needs.
    """

    step: int
    saved: dict[int, Any]


class TwoPassStep:
    """One rank's part of both phases.

    Args:
        program: The lowered program of both.
        compiled: The stages.
        state: The parameters and buffers of this rank's stage by name.
        context: This rank.
        gradients: Takes each parameter's gradient of each microbatch.
        end: The end of each backward pass: the sum over replicas, and ``grad``.
        await_buffers: As of :class:`adaptra.runtime.worker.stages.stage.TrainingStage`.
        executor: Makes the executor of a program that runs this stage.

    Attributes:
        receive_counts: The number of receive buffers needed at a time, per source rank and message.
    """

    def __init__(
        self,
        program: Program,
        compiled: CompiledStages,
        state: Mapping[str, Tensor],
        context: RankContext,
        gradients: Gradients,
        end: StepEnd,
        await_buffers: Callable[[], None],
        executor: Callable[[Program, Stage], Executor],
    ) -> None:
        first, last, microbatches = compiled.train[0], compiled.train[-1], program.microbatches
        transport = context.transport
        self._timeout = context.options.timeout
        self._gradients = gradients
        self._end = end
        self._outputs = Broadcast(last.index, Purpose.OUTPUT, microbatches, last.outputs, transport)
        self._input_gradients = Broadcast(0, Purpose.INPUT_GRADIENT, microbatches, first.grad_inputs, transport)
        self._stage = TwoPassStage(
            compiled.train[transport.rank],
            state,
            seed=context.options.seed,
            root=RootGradient(Reduction.MEAN, microbatches, context.device),
            replica=context.replica,
            is_last=transport.rank == last.index,
            gradients=gradients,
            await_buffers=await_buffers,
            send_outputs=self._outputs.send,
            send_input_gradients=self._input_gradients.send,
        )
        self._forward = executor(program.only(_FORWARD), self._stage)
        self._backward = executor(program.only(_BACKWARD), self._stage)
        # Added up, as receives of one phase may be pre-posted while the other runs.
        self.receive_counts: Counter[tuple[int, MessageSpec]] = _counts(self._forward, self._outputs) + _counts(
            self._backward, self._input_gradients
        )

    def forward(self, step: int, inputs: Sequence[Sequence[Tensor]]) -> tuple[tuple[Tensor, ...], PendingBackward]:
        """Run F of all microbatches.

        Args:
            step: The number of this call.
            inputs: The model's inputs per microbatch; only used on the first stage's rank.

        Returns:
            The model's outputs for the whole batch, on every rank, and the state for :meth:`backward`.
        """
        self._outputs.begin_step(step)
        self._forward.run(step, inputs, [()] * self._forward.program.microbatches)
        return self._outputs.end_step(self._timeout), PendingBackward(step, self._stage.take_saved())

    def backward(self, kept: PendingBackward, tangents: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Run I and W of all microbatches, and add their gradients, the mean over the replicas, to each parameter's ``grad``.

        Args:
            kept: The state that :meth:`forward` returned; it is empty afterwards.
            tangents: Per microbatch, the gradients of the outputs that have one; only used on the last stage's rank.

        Returns:
            The gradients of the inputs that have one, for the whole batch, on every rank.
        """
        self._input_gradients.begin_step(kept.step)
        self._end.begin()
        self._gradients.begin_step(kept.step)
        self._stage.begin_backward(kept.saved, tangents)
        with self._end.adding():
            self._backward.run(kept.step, (), ())
            input_gradients = self._input_gradients.end_step(self._timeout)
            self._gradients.end_step()  # afterwards, as sums of shared parameters follow on the same channels
        self._end.reduce()
        self._end.commit(Certificate(torch.empty(0), None))
        return input_gradients


def _counts(executor: Executor, results: Broadcast) -> Counter[tuple[int, MessageSpec]]:
    return Counter(executor.receive_counts) + Counter(results.receive_counts())
