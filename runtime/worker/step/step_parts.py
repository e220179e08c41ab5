"""The parts of a training step around its program: those that begin before it, and those that end after it, in this order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from adaptra.collectives.rounds import ALGORITHMS
from adaptra.errors import BatchError
from adaptra.graph import CompiledStages
from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.program import Program
from adaptra.program.placement import Edge, stages_of
from adaptra.program.routing import Routing
from adaptra.runtime.data_parallel.accumulators import Accumulators
from adaptra.runtime.data_parallel.equal_numbers import BITS, are_equal, bits_of, mean_number
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.data_parallel.gradient_sum import GradientSum
from adaptra.runtime.data_parallel.replica_buffers import ReplicaBuffers
from adaptra.runtime.detection.shape_scales import RelativeSizes
from adaptra.runtime.devices.device_clock import Mark
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.options import Options
from adaptra.runtime.options.reduce_options import Reduce
from adaptra.runtime.outputs.step_outputs import StepOutputs
from adaptra.runtime.step_messages.gradient_norms import GradientNorms
from adaptra.runtime.step_messages.loss_broadcast import LossBroadcast
from adaptra.runtime.step_messages.probes import Probes
from adaptra.runtime.step_messages.shared_gradients import AwayFromHome, Gradients, SharedParameter
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.worker.stages.gradient_hooks import GradientHooks
from adaptra.runtime.worker.stages.loss_reduction import Reduction, total_weight
from adaptra.runtime.worker.stages.stage import EvaluationStage, ForwardStage, Stage, TrainingStage, UnevenForwards, UnevenStage
from adaptra.runtime.worker.step.executor import Executor
from adaptra.runtime.worker.step.shapes import FIRST, RankShape, StepShape

Batch = Sequence[Sequence[Tensor]]
"""The tensors of a step, per microbatch."""


class ForeignStage(NamedTuple):
    """A stage of another replica, some of whose microbatches this rank computes."""

    stage: TrainingStage
    gradients: Gradients
    sums: Accumulators


class StepParts:
    """One rank's stages with their gradients, losses, probes, buffers and hooks. Used by the thread that runs the steps.

    Args:
        compiled: The model's stages.
        state: The parameters and buffers of this rank's stages by their names in the user's model.
        placement: ``placement[stage]`` is the stage's rank.
        microbatches: Microbatches per step.
        transport: This rank's transport.
        job: The transport of all replicas' ranks; the same without replicas.
        replicas: The ranks that have copies of these stages, or None without data parallelism.
        monitor: Records the flights of probes and the sum over replicas.
        mark: The present time on this rank's device, as :meth:`adaptra.runtime.devices.device_clock.OpClock.mark`.
        options: Seed, timeout, and whether buffers are broadcast.
        reduction: The reduction of the losses of microbatches and replicas to that of the batch.

    Attributes:
        trainable: The trainable parameters of this rank's stages by name.
        sums: The sums of their gradients in the step that is under way.
        gradients: Adds up their gradients.
        norms: The norm of all ranks' gradients.
        buffers: Keeps the buffers of replicas equal.
        stages: This rank's stages in training, by number, for the shape of the compilation.
        first: What of this rank depends on that shape.
        replica: This pipeline's number among the replicas.
    """

    def __init__(
        self,
        compiled: CompiledStages,
        state: Mapping[str, Tensor],
        placement: Sequence[int],
        microbatches: int,
        transport: Transport,
        job: Transport,
        replicas: Replicas | None,
        monitor: Monitor,
        mark: Callable[[], Mark],
        options: Options,
        reduction: Reduction,
    ) -> None:
        rank = transport.rank
        own = stages_of(rank, placement)
        self.trainable: Final = {name: state[name] for stage in own for name in compiled.train[stage].trainable}
        self._shared = [SharedParameter(one.name, one.stages, one.owner, one.order) for one in compiled.tied]
        self._probes = Probes(rank, placement, transport, monitor, _message_bytes(compiled))
        self.sums: Final = Accumulators(self.trainable)
        self.gradients: Final = Gradients(
            rank, self.sums, self._shared, placement, transport, options.timeout, self._probes.answer
        )
        self.norms: Final = GradientNorms(rank, self.trainable, compiled, placement, transport)
        self._hooks = GradientHooks(self.trainable, compiled.copied(placement))
        self._placement = tuple(placement)
        self._transport = transport
        self.replica: Final = 0 if replicas is None else replicas.index
        self._compiled = compiled
        changing = {name for stage in own for name in self._changing(stage)}
        broadcast = replicas if options.broadcast_buffers else None
        self.buffers: Final = ReplicaBuffers(broadcast, [state[name] for name in sorted(changing)])
        self._state = state
        self._last = compiled.train[-1].index
        self._microbatches = microbatches
        self._job = job
        self._seed = options.seed
        self._reduction = reduction
        self._timeout = options.timeout
        self._sum = None if replicas is None else self._gradient_sum(replicas, options.reduce, mark)
        self.stages: Final = {stage: self._stage(self.replica, stage, self.gradients, state) for stage in own}
        rows = (next((one.shape[0] for one in compiled.train[0].inputs if one.shape), 1),) * microbatches
        first = StepShape(FIRST, FIRST, rows, compiled, None, lambda plan: plan.program, (1.0,) * len(compiled.train))
        self.first: Final = RankShape(first, self.stages, self._losses_of(first), self._sizes_of(first))
        self._foreign: dict[tuple[int, int], ForeignStage] = {}
        self._replicas = replicas
        self._monitor = monitor

    def of_shape(self, shape: StepShape) -> RankShape:
        """Return what of this rank depends on another shape of batch."""
        made: dict[int, Stage] = {}
        for number in self.stages if shape.trains else ():
            larger = self._stage(self.replica, number, self.gradients, self._state, shape)
            rest = None if shape.smaller is None else self._stage(self.replica, number, self.gradients, self._state, shape, -1)
            made[number] = larger if rest is None or shape.count is None else UnevenStage(larger, rest, shape.count)
        return RankShape(shape, made, self._losses_of(shape), self._sizes_of(shape))

    def _sizes_of(self, shape: StepShape) -> RelativeSizes | None:
        if not shape.trains or shape.smaller is not None or shape.microbatches != self._microbatches:
            return None
        first, own = _message_bytes(self._compiled), _message_bytes(shape.larger)
        messages = {edge: own[edge] / size for edge, size in first.items() if edge in own}
        return RelativeSizes(dict(enumerate(shape.relative)), messages)

    def _losses_of(self, shape: StepShape) -> LossBroadcast:
        compiled, placement = shape.larger, self._placement
        results = compiled.train[-1].outputs if compiled.trains else (compiled.eval[-1].loss or compiled.eval[-1].outputs)
        # A pipeline without a loss broadcasts none, and a scalar stands for it.
        loss = results[0] if compiled.with_loss else TensorSpec((), results[0].dtype)
        sharing = {placement[stage] for one in compiled.tied if self._last in one.stages for stage in one.stages}
        own = self._transport.rank, placement, shape.microbatches
        return LossBroadcast(*own, loss, sharing, self._transport, shape.code)

    def stages_of(self, program: Program) -> dict[tuple[int, int], TrainingStage]:
        """Return this rank's stages by replica and number, as the ops of a program name them.

        Those of other replicas have the same parameters, and weight gradients of their own until they are handed over.
        """
        if program.is_one_pipeline:
            return {(0, number): stage for number, stage in self.stages.items()}
        found = {(self.replica, number): stage for number, stage in self.stages.items()}
        for op in program.orders[self._transport.worker_of(self._transport.rank)]:
            if op.kind.is_compute and (op.replica, op.stage) not in found:
                found[op.replica, op.stage] = self._foreign_stage(program.routing, op.replica, op.stage).stage
        return found

    def handed_over_of(self, stage: int) -> tuple[MessageSpec, MessageSpec]:
        """Return the tensors in which a stage's weight gradients are handed over, and the buffers that it changes.

        There are none of a stage on another rank.
        """
        return (one.handed_over, one.changing) if (one := self.stages.get(stage)) is not None else ((), ())

    def receive_counts_of(self, executor: Executor) -> Counter[tuple[int, MessageSpec]]:
        """Return the number of receive buffers for messages beside a program with routes, at a time, per source worker and
        message: other replicas' contributions to shared parameters, and rate probes.
        """
        away = self._away_from_home(executor.program)
        rates = self._probes.receive_counts_of(executor.heard)
        found = Counter({(self._transport.worker_of(rank), specs): count for (rank, specs), count in rates.items()})
        return found if away is None else found + self.gradients.receive_counts_of(away)

    def _away_from_home(self, program: Program) -> AwayFromHome | None:
        """Return which microbatches of this replica others compute on stages that share parameters; None if there are none."""
        routing = program.routing
        if program.is_one_pipeline or not self._shared:
            return None
        workers = {
            (stage, microbatch): holder
            for stage in {stage for one in self._shared for stage in one.stages}
            for microbatch in range(program.microbatches)
            if (holder := routing.holder(self.replica, stage, microbatch)) != routing.workers[self.replica][stage]
        }
        return AwayFromHome(self.replica, workers, self._job) if workers else None

    def _foreign_stage(self, routing: Routing, replica: int, number: int) -> ForeignStage:
        if (replica, number) not in self._foreign:
            sums = Accumulators({name: self._state[name] for name in self._compiled.train[number].trainable})
            homes = [-1 if worker is None else worker for worker in routing.workers[replica]]
            gradients = Gradients(
                self._job.rank, sums, self._shared, homes, self._job, self._timeout, foreign=(replica, number)
            )
            # The other replica's values of changing buffers, which are handed over before they are read.
            buffers = {name: self._state[name].clone() for name in self._changing(number)}
            stage = self._stage(replica, number, gradients, {**self._state, **buffers})
            self._foreign[replica, number] = ForeignStage(stage, gradients, sums)
        return self._foreign[replica, number]

    def _gradient_sum(self, replicas: Replicas, reduce: Reduce, mark: Callable[[], Mark]) -> GradientSum:
        late = {one.name for one in self._shared}.intersection(self.trainable)
        bucket = reduce.bucket or replicas.best_bucket(sum(one.nbytes for one in self.trainable.values()))
        replicas.add_by(ALGORITHMS[reduce.algorithm], limit=bucket, dtype=reduce.dtype)
        return GradientSum(replicas, self.sums, late, bucket, self._reduction is Reduction.MEAN, mark)

    def _changing(self, stage: int) -> list[str]:
        return sorted(self._compiled.changing.intersection(self._compiled.train[stage].buffers))

    def _stage(
        self,
        replica: int,
        number: int,
        gradients: Gradients,
        state: Mapping[str, Tensor],
        shape: StepShape | None = None,
        microbatch: int = 0,
    ) -> TrainingStage:
        """Return a stage for the microbatches of the same size as this one; without a shape for those of the first."""
        of_home = self._sum if gradients is self.gradients else None
        compiled, shares = self._compiled, ()
        if shape is not None:
            compiled, shares = (shape.smaller if microbatch and shape.smaller else shape.larger), shape.shares
        return TrainingStage(
            compiled.train[number],
            state,
            seed=self._seed,
            microbatches=self._microbatches if shape is None else shape.microbatches,
            first_microbatch=replica * self._microbatches,
            share=shares[microbatch] if shares else None,
            replica=replica,
            is_last=number == self._last,
            gradients=gradients,
            reduction=self._reduction,
            await_buffers=self.buffers.wait,
            changing=self._changing(number),
            complete=of_home.complete if of_home is not None and of_home.overlaps else None,
        )

    def receive_counts(self) -> Counter[tuple[int, MessageSpec]]:
        """Return the number of receive buffers for messages that are not in a program, at a time, per source rank and
        message.
        """
        senders = (self.gradients, self.first.losses, self._probes, self.norms)
        return sum((Counter(each.receive_counts()) for each in senders), Counter())

    def run(
        self,
        executor: Executor,
        step: int,
        inputs: Batch,
        targets: Batch,
        loss_scale: float,
        steps_before: int,
        shape: RankShape,
        outputs: dict[int, StepOutputs],
    ) -> Tensor:
        """Run a training step and accumulate gradients.

        Args:
            executor: Runs the step's program.
            step: The step's number in this pipeline.
            inputs, targets: Per microbatch, as the executor takes them.
            loss_scale: The factor of the loss in the gradients.
            steps_before: The number of training steps before this pipeline's first one, which random numbers add to the step.
            shape: The shape of the batch.
            outputs: By replica, take the model's outputs on the rank of the last stage. Other replicas are added that ask for
                outputs of their microbatches.

        Returns:
            The loss of every microbatch, (microbatches,), on every rank; if weighted (microbatches, 2), each a sum and its
            weight.
        """
        self._probes.begin_step(step, None if executor.program.is_one_pipeline else executor.heard)
        shape.losses.begin_step(step)
        self._hooks.begin_step()
        # Autograd adds microbatches to earlier gradients one by one. What is divided, or given to a hook, is the step's alone.
        self.sums.begin_step(self._hooks.names if self._reduction is Reduction.MEAN else self.trainable)
        self.gradients.begin_step(step, self._away_from_home(executor.program))
        self.buffers.begin()
        for number, stage in shape.stages.items():
            stage.begin_step(loss_scale, steps_before, outputs.get(self.replica) if number == self._last else None)
        worker, is_home = self._transport.worker_of(self._transport.rank), executor.program.is_one_pipeline
        for (replica, number), foreign in self._foreign.items():
            foreign.stage.begin_step(loss_scale, steps_before)
            # Gradients of earlier steps are the same in all replicas, since their mean or sum was taken.
            foreign.sums.begin_as(self.sums if not is_home and executor.program.holder(replica, number, 0) == worker else None)
            foreign.gradients.begin_step(step)
        if self._sum is None:
            self._run_program(executor, step, inputs, targets, shape.losses, outputs)
        else:  # from the last W on, and while the stages that end later still compute
            self._sum.begin_step()
            try:
                self._run_program(executor, step, inputs, targets, shape.losses, outputs)
            except BaseException:
                self._sum.close()
                raise
            self._monitor.reduce(*self._sum.end_step())
        losses = self._end_losses(shape)
        weight = total_weight(losses) if self._reduction is Reduction.WEIGHTED else None
        if weight is not None and 0 < weight < float("inf"):
            self.sums.divide(weight)
        elif weight is not None:
            self.sums.discard()
        self.sums.fill(self._hooks.names)
        self._probes.end_step(self._timeout)
        return losses

    def _run_program(
        self,
        executor: Executor,
        step: int,
        inputs: Batch,
        targets: Batch,
        losses: LossBroadcast,
        outputs: dict[int, StepOutputs],
    ) -> None:
        def keep_for(replica: int) -> None:
            outputs[replica] = StepOutputs()
            self._foreign[replica, self._last].stage.keep_outputs(outputs[replica])

        executor.run(
            step,
            inputs,
            targets,
            on_message=self._probes.answer,
            on_results=losses.send,
            asks=self.replica in outputs,
            on_asked=keep_for,
        )
        self.gradients.end_step()
        self.buffers.end()

    def close(self) -> None:
        """End the thread that sums gradients, if there is one."""
        if self._sum is not None:
            self._sum.close()

    def outputs(self, shape: StepShape) -> dict[int, StepOutputs]:
        """Return what takes the model's outputs of a step, by this replica; nothing if the last stage is on another rank."""
        return {self.replica: StepOutputs(shape.rows)} if self._last in self.stages else {}

    def run_evaluation(
        self,
        executor: Executor,
        step: int,
        inputs: Batch,
        targets: Batch | None,
        shape: RankShape,
        stages: Mapping[int, ForwardStage],
        outputs: Mapping[int, StepOutputs],
    ) -> Tensor | None:
        """Run the forwards of an evaluation.

        Args:
            executor: Runs the program of forwards.
            step: The evaluation's number, negative.
            inputs, targets: Per microbatch; without targets the outputs are returned instead of losses.
            shape: The shape of the batch.
            stages: This rank's stages in evaluation mode, which the executor runs.
            outputs: By replica, take the model's outputs on the rank of the last stage.

        Returns:
            With targets the loss of every microbatch, the mean over the replicas, on every rank.
        """
        self.buffers.begin(aside=True)
        for number, stage in stages.items():
            stage.begin_step(1.0, outputs=outputs.get(self.replica) if number == self._last else None)
        losses = None
        if targets is None:
            executor.run(step, inputs, [()] * shape.shape.microbatches)
        else:
            shape.losses.begin_step(step)
            executor.run(step, inputs, targets, on_results=shape.losses.send)
            losses = self._end_losses(shape, aside=True)
        self.buffers.end()
        return losses

    def evaluation_stages(
        self, shape: StepShape, state: Mapping[str, Tensor], *, with_loss: bool, with_outputs: bool
    ) -> dict[int, ForwardStage]:
        """Return this rank's stages in evaluation mode, by number."""

        def of(compiled: CompiledStages, stage: int) -> EvaluationStage:
            return EvaluationStage(
                compiled.eval[stage],
                state,
                with_loss=with_loss,
                with_outputs=with_outputs,
                is_last=stage == self._last,
                await_buffers=self.buffers.wait,
            )

        if shape.smaller is None or shape.count is None:
            return {stage: of(shape.larger, stage) for stage in self.stages}
        return {stage: UnevenForwards(of(shape.larger, stage), of(shape.smaller, stage), shape.count) for stage in self.stages}

    def _end_losses(self, of: RankShape, *, aside: bool = False) -> Tensor:
        """Return the losses of all microbatches, over all replicas.

        Replicas may have different numbers of microbatches, with zeros for those that one lacks.

        Raises:
            BatchError: Replicas have batches of different numbers of rows, and the mean of their losses is wanted.
        """
        losses = of.losses.end_step(self._timeout)
        if self._replicas is None:
            return losses
        mean, own = self._reduction is Reduction.MEAN, len(losses)
        if own < self._microbatches:
            losses = torch.cat([losses, losses.new_zeros(self._microbatches - own, *losses.shape[1:])])
        rows, hooks = sum(of.shape.rows), () if aside else self._hooks.marks()
        marks = losses.new_tensor(bits_of((rows, *hooks)), dtype=torch.float32)
        combined = self._replicas.combine_losses(losses, mean=mean, aside=aside, beside=[marks])
        means = (marks if mean else marks / len(self._replicas.ranks)).tolist()
        if mean and not are_equal(means[:BITS]):
            raise BatchError(
                f"replica {self.replica} has a batch of {rows} rows, and others have other numbers, "
                f"{mean_number(means[:BITS]):g} on average: expected the same number on all replicas, as reduction='mean' "
                "gives each replica the same weight; reduction='sum' and 'weighted' take any numbers"
            )
        if not aside:
            self._hooks.check_marks(means[BITS:], self.replica)
        return combined[:own] if mean else combined


def _message_bytes(compiled: CompiledStages) -> dict[Edge, int]:
    """Return the bytes of a message of each directed edge that carries any."""
    last = compiled.train[-1].index
    forward = {(one.index, one.index + 1): one.output_bytes for one in compiled.train if one.index < last}
    backward = {(one.index, one.index - 1): one.grad_input_bytes for one in compiled.train if one.index > 0}
    return {edge: size for edge, size in (forward | backward).items() if size > 0}
