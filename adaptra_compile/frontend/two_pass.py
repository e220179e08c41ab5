"""Pipelines of functions that return no loss: a forward pass now, and a backward pass when gradients come from outside.

Each is pipelined over all microbatches. In between every rank holds what all of them keep, which a loss would spare it: then
the backward pass of the first microbatch would begin as soon as its forward pass has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adaptra.errors import PipelineError
from adaptra.frontend.activation_memory import predicted_peaks
from adaptra.frontend.api import Pipeline
from adaptra.planning.planner import plan
from adaptra.program.schedules import one_f_one_b
from adaptra.runtime.worker.two_pass import PendingBackward
from adaptra.sizes import size_text


@dataclass(slots=True)
class Call:
    """A forward pass, for its backward pass. What it holds is freed with it.

    Attributes:
        kept: What it left on each rank of this process; None once the backward pass has run.
        watched: Tensors that the backward pass reads, or the copies of which it reads, and their versions in the forward pass.
    """

    kept: tuple[PendingBackward, ...] | None
    watched: tuple[tuple[Tensor, int], ...]


class TwoPassPipeline(Pipeline):
    """A pipeline without a loss, of a request with ``with_loss=False``; of :meth:`Pipeline.step` the two halves.

    All ranks call :meth:`forward` and :meth:`backward` in the same order.
    """

    def step(self, inputs: Any = None, targets: Any = None, /, **kwargs: Any) -> Tensor:
        """Refuse a step.

        Raises:
            PipelineError: Always: there is no loss.
        """
        raise PipelineError("this pipeline is of a function without a loss: expected calls of that function and their backward")

    def forward(self, inputs: Sequence[Tensor], watched: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Call]:
        """Run the forward pass of all microbatches.

        Args:
            inputs: A whole batch.
            watched: What must not have changed when the backward pass runs.

        Returns:
            The outputs for the whole batch, on every rank, without gradients; and what :meth:`backward` needs.

        Raises:
            BatchError, PeerLostError, PipelineError: As :meth:`Pipeline.step`.
        """
        built = self._require()
        with built.at_the_door():
            microbatches = built.split_inputs(inputs, {})
            built.compare_rows("forward", tuple(inputs), None, {})
        *_, (outputs, _) = found = built.on_every_rank(lambda worker: worker.forward(microbatches), "forward")
        return outputs, Call(tuple(kept for _, kept in found), tuple((one, one._version) for one in watched))

    def backward(self, call: Call, tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the backward pass of all microbatches and add its gradients to every parameter's ``grad``.

        Args:
            call: Of the forward pass, which may be any earlier one.
            tangents: The gradient of each output of :attr:`differentiable`.

        Returns:
            The gradient of each input that has one, for the whole batch, on every rank.

        Raises:
            PipelineError: It has run before, or what it reads has changed since the forward pass.
            PeerLostError: As :meth:`Pipeline.step`.
        """
        built = self._require()
        with built.at_the_door():
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
        count = built.microbatches
        whole = [tangent.contiguous() for tangent in tangents]
        columns = [one.chunk(count) if count > 1 else (one,) for one in whole]  # a single one may be without dimensions
        microbatches = [tuple(column[index] for column in columns) for index in range(count)]
        of_rank = dict(zip((worker.rank for worker in built.workers), kept, strict=True))
        return built.on_every_rank(lambda worker: worker.backward(of_rank[worker.rank], microbatches), "backward")[0]

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """Of each output, whether there is a gradient of it."""
        return tuple(one.requires_grad for one in self._require().compiled.train[-1].outputs)

    @property
    def differentiated(self) -> tuple[bool, ...]:
        """Of each input, whether :meth:`backward` returns its gradient."""
        return tuple(one.requires_grad for one in self._require().compiled.train[0].inputs)

    def report(self) -> str:
        """The table of :meth:`Pipeline.report`, and what it costs in memory that the function returns no loss."""
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
                super().report().rstrip("\n"),
                f"The function returns no loss, so forward and backward are each pipelined over all {case.microbatches} "
                "microbatches,",
                "whose activations are all held in between. What a rank holds at most, and would hold if it returned its loss:",
                *ranks,
                "",
            ]
        )
