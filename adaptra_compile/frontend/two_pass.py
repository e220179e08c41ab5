"""Pipelines of functions that return no loss: a forward pass now, and a backward pass when gradients come from outside.

Each pass is pipelined over all microbatches. Between the two, every rank keeps the activations of all microbatches. With a loss
it would need less memory, since the backward pass of a microbatch could begin as soon as its forward pass has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from adaptra.errors import PipelineError
from adaptra.frontend.api import Pipeline
from adaptra.frontend.arguments.step_arguments import Outputs
from adaptra.frontend.planned.activation_memory import predicted_peaks
from adaptra.planning.planner import plan
from adaptra.program.schedules import one_f_one_b
from adaptra.runtime.worker.step.two_pass import PendingBackward
from adaptra.sizes import size_text


@dataclass(slots=True)
class Call:
    """A forward pass and the values saved for its backward pass. They are freed with it.

    Attributes:
        kept: The saved values of each rank of this process; None once the backward pass has run.
        watched: Tensors that the backward pass reads, directly or as copies, with their versions in the forward pass.
    """

    kept: tuple[PendingBackward, ...] | None
    watched: tuple[tuple[Tensor, int], ...]


class TwoPassPipeline(Pipeline):
    """A pipeline without a loss, for a request with ``with_loss=False``. It has the two halves of :meth:`Pipeline.step`.

    All ranks call :meth:`forward` and :meth:`backward` in the same order.
    """

    def step(self, inputs: Any = None, targets: Any = None, /, *, outputs: Outputs = False, **kwargs: Any) -> NoReturn:
        """Refuse a step.

        Raises:
            PipelineError: Always: there is no loss.
        """
        raise PipelineError("this pipeline is of a function without a loss: expected calls of that function and their backward")

    def forward(self, inputs: Sequence[Tensor], watched: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Call]:
        """Run the forward pass of all microbatches.

        Args:
            inputs: A whole batch.
            watched: Tensors that must not change before the backward pass.

        Returns:
            The outputs for the whole batch, on every rank, without gradients; and the call for :meth:`backward`.

        Raises:
            BatchError, PeerLostError, PipelineError: As :meth:`Pipeline.step`.
        """
        session = self._require()
        with session.local.at_the_door():
            microbatches = session.batches.split_inputs(inputs, {})
            session.hosted_batches.compare_rows("forward", {self.replica: {"inputs": tuple(inputs)}})
        *_, (outputs, _) = found = session.local.on_every_rank(lambda worker: worker.forward(microbatches), "forward")
        return outputs, Call(tuple(kept for _, kept in found), tuple((one, one._version) for one in watched))

    def backward(self, call: Call, tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the backward pass of all microbatches and add its gradients to every parameter's ``grad``.

        Args:
            call: The call of any earlier forward pass.
            tangents: The gradient of each output of :attr:`differentiable`.

        Returns:
            The gradient of each input that has one, for the whole batch, on every rank.

        Raises:
            PipelineError: It has run before, or a tensor that it reads has changed since the forward pass.
            PeerLostError: As :meth:`Pipeline.step`.
        """
        session = self._require()
        with session.local.at_the_door():
            kept = call.kept
            if kept is None:
                raise PipelineError(
                    "the backward pass of this call has run, and what it needed is gone: expected one backward per call, also "
                    "with retain_graph=True; call the compiled function again"
                )
            if any(tensor._version != version for tensor, version in call.watched):
                raise PipelineError(
                    "a parameter or an input of this call has been changed in place since: expected its backward before "
                    "optimizer.step() and before its inputs are overwritten"
                )
            call.kept = None
        count = session.microbatches
        whole = [tangent.contiguous() for tangent in tangents]
        columns = [one.chunk(count) if count > 1 else (one,) for one in whole]  # one may lack dimensions
        microbatches = [tuple(column[index] for column in columns) for index in range(count)]
        of_rank = dict(zip((worker.rank for worker in session.workers), kept, strict=True))
        return session.local.on_every_rank(lambda worker: worker.backward(of_rank[worker.rank], microbatches), "backward")[0]

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """Whether each output has a gradient."""
        return tuple(one.requires_grad for one in self._require().compiled.train[-1].outputs)

    @property
    def differentiated(self) -> tuple[bool, ...]:
        """Whether :meth:`backward` returns the gradient of each input."""
        return tuple(one.requires_grad for one in self._require().compiled.train[0].inputs)

    def report(self) -> str:
        """Return the table of :meth:`Pipeline.report` alone, and the additional memory needed because there is no loss."""
        compiled, case = self._require().compiled, self.plan.case
        adapted, least = plan(case), one_f_one_b(case.cost.stages, case.microbatches)
        peaks = (predicted_peaks(program, compiled.train) for program in (self.plan.program, adapted, least))
        sizes = (tuple(map(size_text, of_rank)) for of_rank in zip(*peaks, strict=True))
        ranks = [
            f"  rank {rank}: {held}; {better} as adapted to the estimated costs, {best} under 1F1B"
            for rank, (held, better, best) in enumerate(sizes)
        ]
        return "\n".join(
            [
                self._stage_table().rstrip("\n"),
                f"The function returns no loss, so forward and backward are each pipelined over all {case.microbatches} "
                "microbatches,",
                "whose activations are all held in between. What a rank holds at most, and would hold if it returned its loss:",
                *ranks,
                "",
            ]
        )
