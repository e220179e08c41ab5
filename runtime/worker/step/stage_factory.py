"""Makes one rank's stages, for every shape of batch and for microbatches of other replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

from adaptra.graph import CompiledStages
from adaptra.graph.ops.specs import TensorSpec
from adaptra.program.placement import Edge, stages_of
from adaptra.runtime.detection.shape_scales import RelativeSizes
from adaptra.runtime.step_messages.loss_broadcast import LossBroadcast
from adaptra.runtime.step_messages.shared_gradients import Gradients
from adaptra.runtime.worker.stages.loss_reduction import Reduction, RootGradient
from adaptra.runtime.worker.stages.stage import EvaluationStage, ForwardStage, Stage, TrainingStage, UnevenForwards, UnevenStage
from adaptra.runtime.worker.step.rank_context import RankContext
from adaptra.runtime.worker.step.shapes import FIRST, RankShape, StepShape


class StageFactory:
    """Makes stages of one rank.

    Args:
        compiled: The model's stages.
        state: The parameters and buffers of this rank's stages by their names in the user's model.
        microbatches: Microbatches per step.
        context: This rank.
        reduction: The reduction of the losses of microbatches and replicas to that of the batch.
        gradients: Takes the gradients of this replica's microbatches.
        complete, await_buffers: As of :class:`adaptra.runtime.worker.stages.stage.TrainingStage`.

    Attributes:
        compiled, state: As given.
        own: The numbers of this rank's stages.
        last: The number of the model's last stage.
    """

    def __init__(
        self,
        compiled: CompiledStages,
        state: Mapping[str, Tensor],
        microbatches: int,
        context: RankContext,
        reduction: Reduction,
        gradients: Gradients,
        complete: Callable[[str], None] | None,
        await_buffers: Callable[[], None],
    ) -> None:
        self.compiled: Final = compiled
        self.state: Final = state
        self.own: Final = tuple(stages_of(context.rank, context.placement))
        self.last: Final = compiled.train[-1].index
        self._microbatches = microbatches
        self._context = context
        self._reduction = reduction
        self._gradients = gradients
        self._complete = complete
        self._await_buffers = await_buffers

    def first(self) -> RankShape:
        """Return what of this rank depends on the shape of the compilation."""
        compiled = self.compiled
        rows = (next((one.shape[0] for one in compiled.train[0].inputs if one.shape), 1),) * self._microbatches
        shape = StepShape(FIRST, FIRST, rows, compiled, None, lambda plan: plan.program, (1.0,) * len(compiled.train))
        return self.of_shape(shape)

    def of_shape(self, shape: StepShape) -> RankShape:
        """Return what of this rank depends on a shape of batch."""
        stages: dict[int, Stage] = {}
        for number in self.own if shape.trains else ():
            larger = self._home(number, shape, shape.larger, 0)
            stages[number] = larger
            if shape.smaller is not None and shape.count is not None:
                rest = self._home(number, shape, shape.smaller, -1)
                stages[number] = UnevenStage(larger, rest, shape.count)
        return RankShape(shape, stages, self._losses_of(shape), self._sizes_of(shape))

    def foreign(self, replica: int, number: int, gradients: Gradients) -> TrainingStage:
        """Return a stage that computes microbatches of another replica, with buffers of its own if it changes any.

        These are handed over before they are read.
        """
        buffers = {name: self.state[name].clone() for name in self.compiled.changing_in(number)}
        return self._stage(replica, number, self.compiled, {**self.state, **buffers}, self._microbatches, gradients)

    def evaluation(
        self, shape: StepShape, state: Mapping[str, Tensor], *, with_loss: bool, with_outputs: bool
    ) -> dict[int, ForwardStage]:
        """Return this rank's stages in evaluation mode, by number."""

        def of(compiled: CompiledStages, stage: int) -> EvaluationStage:
            return EvaluationStage(
                compiled.eval[stage],
                state,
                with_loss=with_loss,
                with_outputs=with_outputs,
                is_last=stage == self.last,
                await_buffers=self._await_buffers,
            )

        if shape.smaller is None or shape.count is None:
            return {stage: of(shape.larger, stage) for stage in self.own}
        return {stage: UnevenForwards(of(shape.larger, stage), of(shape.smaller, stage), shape.count) for stage in self.own}

    def _home(self, number: int, shape: StepShape, compiled: CompiledStages, microbatch: int) -> TrainingStage:
        """Return a stage for the microbatches of the same size as this one."""
        share = shape.shares[microbatch] if shape.shares else None
        replica = self._context.replica
        of_home = self._gradients, self._complete, share
        return self._stage(replica, number, compiled, self.state, shape.microbatches, *of_home)

    def _stage(
        self,
        replica: int,
        number: int,
        compiled: CompiledStages,
        state: Mapping[str, Tensor],
        microbatches: int,
        gradients: Gradients,
        complete: Callable[[str], None] | None = None,
        share: float | None = None,
    ) -> TrainingStage:
        return TrainingStage(
            compiled.train[number],
            state,
            seed=self._context.options.seed,
            root=RootGradient(self._reduction, microbatches, self._context.device, share),
            first_microbatch=replica * self._microbatches,
            replica=replica,
            is_last=number == self.last,
            gradients=gradients,
            await_buffers=self._await_buffers,
            changing=self.compiled.changing_in(number),
            complete=complete,
        )

    def _sizes_of(self, shape: StepShape) -> RelativeSizes | None:
        if not shape.trains or shape.smaller is not None or shape.microbatches != self._microbatches:
            return None
        first, own = message_bytes(self.compiled), message_bytes(shape.larger)
        messages = {edge: own[edge] / size for edge, size in first.items() if edge in own}
        return RelativeSizes(dict(enumerate(shape.relative)), messages)

    def _losses_of(self, shape: StepShape) -> LossBroadcast:
        compiled, placement = shape.larger, self._context.placement
        results = compiled.train[-1].outputs if compiled.trains else (compiled.eval[-1].loss or compiled.eval[-1].outputs)
        # A pipeline without a loss broadcasts none, and a scalar stands for it.
        loss = results[0] if compiled.with_loss else TensorSpec((), results[0].dtype)
        sharing = {placement[stage] for one in compiled.tied if self.last in one.stages for stage in one.stages}
        tail = self._context.options.within_step
        more = tail.more_of_own(shape.microbatches) if tail is not None and shape.number == FIRST else 0
        own = self._context.rank, placement, shape.microbatches + more
        return LossBroadcast(*own, loss, sharing, self._context.transport, shape.code)


def message_bytes(compiled: CompiledStages) -> dict[Edge, int]:
    """Return the bytes of a message of each directed edge that carries any."""
    last = compiled.train[-1].index
    forward = {(one.index, one.index + 1): one.output_bytes for one in compiled.train if one.index < last}
    backward = {(one.index, one.index - 1): one.grad_input_bytes for one in compiled.train if one.index > 0}
    return {edge: size for edge, size in (forward | backward).items() if size > 0}
