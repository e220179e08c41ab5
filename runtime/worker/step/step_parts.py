"""The parts of a training step around its program: those that begin before it, and those that end after it, in this order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from adaptra.graph import CompiledStages
from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.planning.synchrony.modes import Stealing, XOrder
from adaptra.program import Program
from adaptra.program.placement import stages_of
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.data_parallel.kept_buffers import KeptBuffers
from adaptra.runtime.data_parallel.replica_buffers import ReplicaBuffers
from adaptra.runtime.data_parallel.shards import Shards
from adaptra.runtime.injection.points import Moment
from adaptra.runtime.measuring.step_norms import StepNorms
from adaptra.runtime.outputs.step_outputs import StepOutputs
from adaptra.runtime.step_messages.gradient_norms import GradientNorms, counted_on
from adaptra.runtime.step_messages.probes import Probes
from adaptra.runtime.step_messages.shared_gradients import Gradients, SharedParameter
from adaptra.runtime.synchrony.local_steps import LocalSteps
from adaptra.runtime.worker.ends.replica_losses import ReplicaLosses
from adaptra.runtime.worker.ends.step_end import AllAtOnce, Certificate, Contribution, StepEnd
from adaptra.runtime.worker.ends.x_order import XOrderSteps
from adaptra.runtime.worker.stages.deferred_microbatches import DeferredMicrobatches
from adaptra.runtime.worker.stages.loss_reduction import Reduction
from adaptra.runtime.worker.stages.open_microbatches import OpenMicrobatches
from adaptra.runtime.worker.stages.stage import ForwardStage, Stage
from adaptra.runtime.worker.step.executor import Executor
from adaptra.runtime.worker.step.foreign_stages import ForeignStages
from adaptra.runtime.worker.step.rank_context import RankContext
from adaptra.runtime.worker.step.receive_pool import by_worker
from adaptra.runtime.worker.step.shapes import FIRST, RankShape, StepShape
from adaptra.runtime.worker.step.stage_factory import StageFactory, message_bytes
from adaptra.runtime.worker.step.tail_factory import TailFactory

Batch = Sequence[Sequence[Tensor]]
"""The tensors of a step, per microbatch."""


class StepParts:
    """One rank's stages with their gradients, losses, probes and buffers. Used by the thread that runs the steps.

    Args:
        compiled: The model's stages.
        state: The parameters and buffers of this rank's stages by their names in the user's model.
        microbatches: Microbatches per step.
        context: This rank.
        reduction: The reduction of the losses of microbatches and replicas to that of the batch.

    Attributes:
        factory: Makes this rank's stages.
        end: The end of each step.
        gradients: Adds up the gradients of this rank's stages.
        norms: The norm of all ranks' gradients.
        buffers: Keeps the buffers of replicas equal.
        kept: Copies of other replicas' buffers in a job that survives their loss.
        shards: Who owns which parameters; None if every replica steps all.
        local: The exchanges between sites that take local steps; None in other modes.
        order: The updates in x-order; None in other modes.
        first: What of this rank depends on the shape of the compilation.
        tail: What this rank computes of a step that is not known before it; None where all is known.
    """

    def __init__(
        self,
        compiled: CompiledStages,
        state: Mapping[str, Tensor],
        microbatches: int,
        context: RankContext,
        reduction: Reduction,
    ) -> None:
        rank, placement, transport, options = context.rank, context.placement, context.transport, context.options
        own = stages_of(rank, placement)
        trainable = {name: state[name] for stage in own for name in compiled.train[stage].trainable}
        shared = [SharedParameter(one.name, one.stages, one.owner, one.order) for one in compiled.tied]
        self._context = context
        self._losses = ReplicaLosses(context.replicas, reduction, microbatches)
        self._probes = Probes(rank, placement, transport, context.monitor, message_bytes(compiled))
        self.order: Final = self._x_order(compiled, trainable)
        self.end: Final[StepEnd] = self.order or AllAtOnce(
            trainable,
            compiled.copied(placement),
            {one.name for one in shared}.intersection(trainable),
            self._losses,
            options.reduce,
            context.monitor,
            context.clock.mark,
            fills=not context.is_guest,
            measured=counted_on(own, compiled) if options.noise_scale else None,
        )
        self.gradients: Final = Gradients(
            rank, self.end.sums, shared, placement, transport, options.timeout, self._probes.answer
        )
        self.norms: Final = GradientNorms(rank, trainable, compiled, placement, transport, context.device)
        equal = compiled.changing_in(*own) if options.broadcast_buffers and context.replicas.count > 1 else ()
        self.buffers: Final = ReplicaBuffers(context.replicas, [state[name] for name in equal])
        changing = {name: state[name] for name in compiled.changing_in(*own)} if options.survive else {}
        self.kept: Final = KeptBuffers(
            context.replicas, changing, (0,) if options.broadcast_buffers else range(context.replicas.count)
        )
        self.shards: Shards | None = None
        self.local: Final = self._local_steps(compiled, trainable)
        self.factory: Final = StageFactory(
            compiled, state, microbatches, context, reduction, self.gradients, self.end.complete, self.buffers.wait
        )
        self.first: Final = self.factory.first()
        self._foreign = ForeignStages(self.factory, context, shared)
        self.tail: Final = self._tail(microbatches)
        if isinstance(self.end, AllAtOnce) and isinstance(self.tail, DeferredMicrobatches):
            self.end.defer(self.tail.deferral)

    def close(self) -> None:
        """End the sum over replicas, and the exchanges between sites. There is no later step."""
        self.end.close()
        if self.local is not None:
            self.local.close()
        if self.tail is not None:
            self.tail.close()

    def shard(self, shards: Shards) -> None:
        """Let parameters have owners from the next step on."""
        self.shards = shards
        self.end.shard(shards)
        self.norms.shard(shards)

    def stages_of(self, program: Program) -> dict[tuple[int, int], Stage]:
        """Return this rank's stages by replica and number, as the ops of a program name them."""
        return self._foreign.beside(self.first.stages, program)

    def handed_over_of(self, stage: int) -> tuple[MessageSpec, MessageSpec]:
        """Return the tensors in which a stage's weight gradients are handed over, and the buffers that it changes.

        There are none of a stage on another rank.
        """
        if stage not in self.factory.own:
            return (), ()
        compiled, state = self.factory.compiled, self.factory.state
        changing = [state[name] for name in compiled.changing_in(stage)]
        weights = self.gradients.unshared(compiled.train[stage].contributions)
        return self.gradients.spec_of_sums(weights), tuple(TensorSpec(tuple(one.shape), one.dtype) for one in changing)

    def receive_counts_of(self, executor: Executor) -> Counter[tuple[int, MessageSpec]]:
        """Return the number of receive buffers for messages beside a program with routes, at a time, per source worker and
        message: other replicas' contributions to shared parameters, and rate probes.
        """
        away = self._foreign.away_from_home(executor.program)
        rates = by_worker(self._context.transport, self._probes.receive_counts_of(executor.heard))
        return rates if away is None else rates + self.gradients.receive_counts_of(away)

    def receive_counts(self) -> Counter[tuple[int, MessageSpec]]:
        """Return the number of receive buffers for messages that are not in a program, at a time, per source rank and
        message.
        """
        senders = (self.gradients, self.first.losses, self._probes, self.norms)
        slots = Counter({} if self.tail is None else self.tail.slots.receive_counts())
        return sum((Counter(each.receive_counts()) for each in senders), slots)

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
        *,
        asks: bool,
    ) -> Certificate:
        """Run a training step up to what fills ``grad``: see :meth:`.step_end.StepEnd.commit`.

        Args:
            executor: Runs the step's program.
            step: The step's number in this pipeline.
            inputs, targets: Per microbatch, as the executor takes them.
            loss_scale: The factor of the loss in the gradients.
            steps_before: The number of training steps before this pipeline's first one, which random numbers add to the step.
            shape: The shape of the batch.
            outputs: By replica, take the model's outputs on the rank of the last stage. Other replicas are added that ask for
                outputs of their microbatches.
            asks: Whether the model's outputs are wanted of this replica, whichever rank has them.

        Returns:
            What the gradients are made of. Its losses have the shape (microbatches,), on every rank. If weighted it is
            (microbatches, 2), each a sum and its weight.
        """
        program, replica, timeout = executor.program, self._context.replica, self._context.options.timeout

        def keep_for(other: int) -> None:
            outputs[other] = StepOutputs()
            self._foreign.keep_outputs(other, outputs[other])

        self._probes.begin_step(step, None if program.is_one_pipeline else executor.heard)
        shape.losses.begin_step(step)
        self.end.begin()
        first = 0 if self.tail is None else self.tail.first
        self.gradients.begin_step(step, self._foreign.away_from_home(program), first)
        self.buffers.begin()
        self._begin_stages(shape.stages, outputs, loss_scale, steps_before)
        self._foreign.begin_step(step, program, self.end.sums, loss_scale, steps_before)
        if self.tail is not None:
            self.tail.slots.asks = asks
            # Only the first stage's rank decides. Others, of which some may ask alone, do what fits either.
            is_open = shape.shape.number == FIRST and not (asks and 0 in self.factory.own)
            self.tail.begin_step(step, inputs, targets, loss_scale, steps_before, is_open=is_open)
        with self.end.adding():
            results = executor.run(
                step,
                inputs,
                targets,
                on_message=self._probes.answer,
                on_results=shape.losses.send,
                asks=replica in outputs,
                on_asked=keep_for,
            )
            if self.tail is not None and self.tail.end_step(results) and results:
                shape.losses.send(results)
            if self.tail is not None and asks:
                self.tail.require_all(shape.shape.microbatches)
            self.gradients.end_step()
            self.buffers.end()
        self._context.failures.at(step, Moment.REDUCE)
        self.end.reduce()
        losses = shape.losses.end_step(timeout)
        certificate = self.end.certify(Contribution(replica, shape.shape.rows, losses, loss_scale))
        if self.local is not None:
            weight = certificate.rows if certificate.divisor is None else certificate.divisor
            self.local.count(weight if certificate.has_gradients else 0.0)
        self._probes.end_step(timeout)
        self.kept.gather()
        return certificate

    def norms_of(self, certificate: Certificate, shape: StepShape) -> StepNorms | None:
        """Return what the step of this certificate, the last one, says of the noise of gradients; None where not measured."""
        if self.end.norms is None:
            return None
        loss = self._losses.of_batch(certificate.losses, shape.shares)
        unit = "weights" if self._losses.reduction is Reduction.WEIGHTED else "rows"
        return StepNorms(self.factory.own, *self.end.norms, unit, loss)

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
        self._begin_stages(stages, outputs, 1.0, 0)
        losses = None
        if targets is None:
            executor.run(step, inputs, [()] * shape.shape.microbatches)
        else:
            shape.losses.begin_step(step)
            executor.run(step, inputs, targets, on_results=shape.losses.send)
            losses = shape.losses.end_step(self._context.options.timeout)[: shape.shape.microbatches]
            losses, _ = self._losses.combine(self._context.replica, shape.shape.rows, losses)
        self.buffers.end()
        self.kept.gather()
        return losses

    def outputs(self, shape: StepShape) -> dict[int, StepOutputs]:
        """Return what takes the model's outputs of a step, by this replica; nothing if the last stage is on another rank."""
        return {self._context.replica: StepOutputs(shape.rows)} if self.factory.last in self.factory.own else {}

    def _local_steps(self, compiled: CompiledStages, trainable: Mapping[str, Tensor]) -> LocalSteps | None:
        context, local = self._context, self._context.options.local
        if local is None or context.sites is None:
            return None
        owners = compiled.owners
        fragments: dict[int, dict[str, Tensor]] = {}
        for stage in stages_of(context.rank, context.placement):
            for name in compiled.train[stage].trainable:
                fragments.setdefault(owners.get(name, stage), {})[name] = trainable[name]
        store = under(f"synchrony/{context.world.epoch}", context.job.store)  # an earlier epoch's ballots stay where they are
        votes = context.rank == 0 and context.replicas.index == 0
        return LocalSteps(local, fragments, len(compiled.train), context.replicas, context.sites, store, votes=votes)

    def _x_order(self, compiled: CompiledStages, trainable: Mapping[str, Tensor]) -> XOrderSteps | None:
        context, order = self._context, self._context.options.synchrony
        if not isinstance(order, XOrder) or context.sites is None:
            return None
        copied, store = compiled.copied(context.placement), under(f"synchrony/{context.world.epoch}", context.job.store)
        reduce = context.options.reduce
        return XOrderSteps(order, trainable, copied, self._losses, reduce, context.sites, store, context.rank)

    def _tail(self, microbatches: int) -> OpenMicrobatches | None:
        context, mode = self._context, self._context.options.within_step
        if context.replicas.count == 1 or mode is None:
            return None
        tails = TailFactory(context, self.factory, self.first.stages, microbatches)
        return tails.stolen(mode) if isinstance(mode, Stealing) else tails.deferred(mode)

    def _begin_stages(
        self, stages: Mapping[int, ForwardStage], outputs: Mapping[int, StepOutputs], loss_scale: float, steps_before: int
    ) -> None:
        own = outputs.get(self._context.replica)
        for number, stage in stages.items():
            stage.begin_step(loss_scale, steps_before, own if number == self.factory.last else None)
