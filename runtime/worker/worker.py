"""The worker of one rank: it follows the plan log from step to step, runs its stages, measures and reports.

A worker owns everything of one rank: its stages' state, its transport, its monitor and its end of the controller. Under
torchrun a process has one worker; without a launcher a process has one per rank, each on a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from adaptra.errors import OptionError
from adaptra.graph import CompiledStages
from adaptra.graph.inner_compiler import prepare
from adaptra.json_files import Fields
from adaptra.passes.insert_comm import InsertComm
from adaptra.planning.routes.joined_programs import join
from adaptra.program import Program
from adaptra.runtime.control.agreeing_ranks import AgreeingRanks
from adaptra.runtime.control.agreement.same_rows import is_due, numbers_of
from adaptra.runtime.control.callbacks import ControlCallbacks
from adaptra.runtime.control.controller import CLOSE_SECONDS, Controller
from adaptra.runtime.control.deciding.policy import ControllerOptions
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.data_parallel.kept_buffers import KeptBuffers
from adaptra.runtime.data_parallel.shards import Shards, require_same_settings
from adaptra.runtime.exchange.store_exchange import gather
from adaptra.runtime.injection.failures import Failures
from adaptra.runtime.injection.points import Moment
from adaptra.runtime.measuring.monitor import Monitor, StepRecords, merge_timelines
from adaptra.runtime.measuring.reduces import StepReduces, own_reduce
from adaptra.runtime.measuring.step_norms import NoiseOfStages
from adaptra.runtime.membership.timing import LOST_STORE_SECONDS
from adaptra.runtime.outputs.sharing import SharedOutputs
from adaptra.runtime.outputs.step_outputs import StepOutputs
from adaptra.runtime.rdma.watch import RdmaEvent, watch
from adaptra.runtime.telemetry.rank import RankTelemetry
from adaptra.runtime.transports.process_groups import collectives_of_user
from adaptra.runtime.worker.call_numbers import CallNumbers
from adaptra.runtime.worker.last_steps import LastSteps, RunStep
from adaptra.runtime.worker.rank_errors import RankErrors
from adaptra.runtime.worker.rank_updates import RankUpdates
from adaptra.runtime.worker.rank_values import RankValues
from adaptra.runtime.worker.stages.loss_reduction import Reduction
from adaptra.runtime.worker.step.rank_context import RankContext
from adaptra.runtime.worker.step.rank_programs import RankPrograms
from adaptra.runtime.worker.step.receive_pool import by_worker
from adaptra.runtime.worker.step.shapes import FIRST, StepShape
from adaptra.runtime.worker.step.step_parts import Batch, StepParts
from adaptra.runtime.worker.step.two_pass import PendingBackward, TwoPassStep
from adaptra.simulation.timeline import Timeline
from adaptra.weakly import weakly


class Worker:
    """Runs the steps of one rank.

    It makes, joins and closes all parts of a rank. Steps, programs, control, membership and shared values are classes of their
    own.

    Args:
        compiled: The model's stages.
        state: The parameters and buffers of this rank's stages by their names in the user's model.
        microbatches: Microbatches per step.
        context: This rank.
        initial: The plan of the first step, the same on every rank; its placement defines this rank's stages.
        planning: The compiler, as the controller uses it.
        telemetry: Takes this rank's records.
        first_step: The number of the first step.
        reduction: The reduction of the losses of microbatches and replicas to that of the batch.

    Attributes:
        state, initial: As given.
        numbers: The numbers of the rank's calls.
        last: What is known of the last steps.
        values: Moves parameters and buffers between two steps.
        errors: Reports this rank's errors, and ends its waits by those of others.
        updates: What the updates of its parameters have in them.
    """

    def __init__(
        self,
        compiled: CompiledStages,
        state: Mapping[str, Tensor],
        microbatches: int,
        context: RankContext,
        initial: Plan,
        planning: Planning,
        telemetry: RankTelemetry,
        first_step: int = 0,
        reduction: Reduction = Reduction.MEAN,
    ) -> None:
        transport, job, replicas, options = context.transport, context.job, context.replicas, context.options
        self.state = state
        self.initial = initial
        self.numbers: Final = CallNumbers(first_step)
        self._context = context
        self._telemetry = telemetry
        self.errors: Final = RankErrors(context, self.numbers, telemetry)
        self._parts = StepParts(compiled, state, microbatches, context, reduction)
        self._shapes = {FIRST: self._parts.first}
        self.last: Final = LastSteps(len(self._parts.factory.own))
        if context.options.noise_scale and context.replicas.count > 1:
            self.last.noise = NoiseOfStages()
        self._programs = RankPrograms(compiled, self._parts, context, initial)
        self.values: Final = RankValues(
            context,
            self._parts.factory,
            self._programs.buffers,
            self.numbers,
            weakly(self.errors.meeting),
            weakly(self.errors.check),
        )
        # Replicas that compute for each other agree on one plan log.
        log = job if planning.replicas > 1 else transport
        first = log.rank - self.rank
        self.controller = Controller(
            AgreeingRanks(
                log.rank,
                log.world_size,
                range(first, first + self._context.ranks),
                replicas.pipeline,
            ),
            under("controller", log.store),
            initial,
            replace(planning, ahead_of_need=InsertComm.for_contract(transport.contract).ahead_of_need),
            options=ControllerOptions(adapt=options.adapt, delegate=options.uses_delegate, plan_seconds=options.timeout),
            callbacks=ControlCallbacks(
                weakly(self._programs.prepare),
                telemetry.event,
                weakly(self._take_reduces),
                weakly(self.errors.abort_by_control),
            ),
            first_step=first_step,
            attempt=job.attempt,
        )
        self.updates: Final = RankUpdates(self._parts, self.numbers, self.controller.recorder, self.errors.check)
        self.errors.listen(self.controller)
        self._watcher = watch(transport.rdma_devices, self._record_link_event)
        telemetry.started(initial)

    def step(
        self,
        inputs: Batch,
        targets: Batch,
        loss_scale: float = 1.0,
        shape: int = FIRST,
        *,
        with_outputs: bool = False,
        to_all: bool = False,
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Run one training step and add up its gradients, which are in ``grad`` after :meth:`commit`.

        Args:
            inputs: The model's inputs per microbatch; only used on the first stage's rank.
            targets: The loss's targets per microbatch; only used on the last stage's rank.
            loss_scale: The factor of the loss in the gradients. Losses are returned without it.
            shape: The number of the batch's shape.
            with_outputs: Whether to keep the model's outputs on the rank of the last stage.
            to_all: Whether to send them to all ranks of this pipeline. All ranks of the job give the same.

        Returns:
            The loss of every microbatch, (microbatches,), in microbatch order, on every rank; if weighted (microbatches, 2),
            each a sum and its weight. Then the flat outputs of the whole batch, if they are wanted: on the rank of the last
            stage, or on all ranks.

        Raises:
            PeerLostError: Another rank failed; names it, and the edge and op where known.
            TransportError: A message could not be exchanged.
        """
        step = self.numbers.next_step
        if self.numbers.collectives not in (None, self._collectives()):
            self.monitor.meet(all_ranks=True)
        with self.errors.reporting():
            self.updates.exchange()
            plan = self.controller.plan_for(step)
            goes_home = not plan.program.is_one_pipeline and self._context.replicas.any_has(shape != FIRST)
            executor = self._programs.switch_to(plan, step, shape, at_home=goes_home)
            of = self._shapes[shape]
            outputs = self._parts.outputs(of.shape) if with_outputs else {}
            self._telemetry.begin_step(step, replace(self.plan, program=self.program) if goes_home else self.plan)
            self.monitor.begin_step()
            started = time.monotonic()
            self.failures.at(step, Moment.BEGIN)
            before = self.numbers.steps_before
            certificate = self._parts.run(executor, step, inputs, targets, loss_scale, before, of, outputs, asks=with_outputs)
            self.updates.tell_tail()
            measurement = self.monitor.end_step(step, started, time.monotonic(), of.shape.code)
        self.last.run = RunStep(certificate, measurement, of, goes_home)
        return certificate.losses, self._whole(step, outputs, executor.program, to_all=to_all)

    def exchange(self) -> None:
        """Exchange with all other sites what this one has learnt, between two steps; all ranks of the job call it."""
        with self.errors.meeting():
            self.updates.exchange(all_now=True)

    def go_on_at(self, step: int, updates: int) -> None:
        """Set the number of the next step of the training, on which random numbers depend, and that of updates before it."""
        self.numbers.go_on_at(step)
        self.updates.go_on_at(updates)

    def align_copies(self) -> None:
        """Replace copies of values by the first holder's; all ranks call it."""
        self.values.align_copies()
        self.updates.restart()

    def at_certificate(self) -> None:
        """Fail if this worker is to fail between a step that has run and its :meth:`commit`."""
        if self.last.run is not None:
            self.failures.at(self.numbers.next_step, Moment.CERTIFICATE)

    def commit(self) -> None:
        """End the step that has run: fill ``grad``, run hooks and report. No rank has to run it again.

        Raises:
            Exception: An error of a hook.
        """
        step = self.last.run
        assert step is not None, "a step has run"
        self.last.run = None
        self.kept.commit()
        with self.errors.reporting():
            self._parts.end.commit(step.certificate)
            self.updates.end_step()
            self.numbers.next_step += 1
            self.numbers.collectives = self._collectives()
            self._tell_choice()
            comparable = self.last.take(step.measurement, step.shape, at_home=step.at_home)
            if not self.controller.coordinates:
                self.last.reduces = own_reduce(step.measurement)
            self.controller.report(comparable)
            tail = self.updates.tail
            self._telemetry.end_step(step.measurement, self.monitor.kept[-1], None if tail is None else tail.moved)
            self._tell_norms(step)

    def _tell_norms(self, step: RunStep) -> None:
        """Tell what a step says of the noise of gradients, where that is measured and the step says anything."""
        if self.last.noise is not None:
            norms = self._parts.norms_of(step.certificate, step.shape.shape)
            self.last.noise.take(norms)
            if norms is not None:
                self._telemetry.normed(step.measurement.step, norms)

    def _tell_choice(self) -> None:
        """Tell of another way to add gradients from the next step on, or of one that ports have called for from the first."""
        choice = self._parts.end.choice
        if choice is None or choice.way == self.last.way:
            return
        if self.last.way is not None or choice.way.late:
            stages = ",".join(map(str, self._parts.factory.own))
            self.controller.recorder.emit_now(EventKind.LATE, f"gradients of stage {stages}: {choice}")
        self.last.way = choice.way

    @property
    def how_gradients_are_added(self) -> str | None:
        """Why gradients are added as they are, where a job chooses or was to choose."""
        return self._parts.end.why

    def _collectives(self) -> int:
        """Return how often the user's own code has had all ranks of this pipeline meet, and maybe others."""
        world = self._context.world
        return collectives_of_user(world.hosts_of(world.pipeline(self._context.replica)))

    def _whole(
        self, step: int, outputs: Mapping[int, StepOutputs], program: Program | None, *, to_all: bool
    ) -> list[Tensor] | None:
        """Return the flat outputs of a step's whole batch, on ranks that get them."""
        if not outputs and not to_all:
            return None
        is_routed = program is not None and not program.is_one_pipeline
        with self.errors.meeting() if to_all or is_routed else self.errors.reporting():
            if program is not None:
                self._shared_outputs.bring_home(program, step, outputs)
            own = outputs.get(self._context.replica)
            flat = None if own is None else own.joined()
            return self._shared_outputs.give_to_all(step, flat) if to_all else flat

    @cached_property
    def _shared_outputs(self) -> SharedOutputs:
        device, timeout = self._context.device, self._context.options.timeout
        return SharedOutputs(
            self._context.placement[-1], self._context.transport, self._context.job, device, self.values.reserve_stream, timeout
        )

    def add_shape(self, shape: StepShape) -> None:
        """Prepare steps of another shape of batch, between two steps.

        Raises:
            PlanError: Not even one microbatch fits the memory.
        """
        added = self._parts.factory.of_shape(shape)
        self._programs.add_shape(added)
        self._shapes[shape.number] = added

    def drop_shape(self, number: int) -> None:
        """Forget a shape of batch, between two steps."""
        del self._shapes[number]
        self._programs.drop_shape(number)

    def compare_rows(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Have this rank's batch compared with those of other ranks, in the first calls and then in every hundredth.

        See :mod:`adaptra.runtime.control.agreement.same_rows`.
        """
        number = self.numbers.compared[call]
        self.numbers.compared[call] += 1
        if self._context.ranks > 1 and is_due(number):
            with self.errors.reporting():
                self.controller.send_checksums(call, number, numbers_of(arguments), self.numbers.training_step)

    def forward(self, inputs: Batch) -> tuple[tuple[Tensor, ...], PendingBackward]:
        """Run the forward pass of all microbatches of a pipeline without a loss.

        Args:
            inputs: As in :meth:`step`.

        Returns:
            The model's outputs for the whole batch, on every rank, and the state for :meth:`backward`.

        Raises:
            As :meth:`step`.
        """
        with self.errors.reporting():
            self._parts.buffers.begin()
            self.failures.at(self.numbers.next_step, Moment.BEGIN)
            outputs, kept = self._phases.forward(self.numbers.next_step, inputs)
            self._parts.buffers.end()
        self.monitor.begin_step()
        self.numbers.next_step += 1
        return outputs, kept

    def backward(self, kept: PendingBackward, tangents: Batch) -> tuple[Tensor, ...]:
        """Run the backward pass of all microbatches and accumulate gradients.

        Args:
            kept: The state that :meth:`forward` returned; it is empty afterwards.
            tangents: Per microbatch, the gradients of the outputs that have one; only used on the last stage's rank.

        Returns:
            The gradients of the inputs that have one, for the whole batch, on every rank.

        Raises:
            As :meth:`step`.
        """
        with self.errors.reporting():
            found = self._phases.backward(kept, tangents)
        self.monitor.begin_step()
        return found

    @cached_property
    def _phases(self) -> TwoPassStep:
        program = self._programs.first()
        self._context.transport.use_lanes(self.numbers.next_step, program)
        phases = TwoPassStep(
            program,
            self._parts.factory.compiled,
            self.state,
            self._context,
            self._parts.gradients,
            self._parts.end,
            self._parts.buffers.wait,
            lambda part, stage: self._programs.executor(part, {(0, self.rank): stage}),
        )
        self._programs.buffers.grow(by_worker(self._context.transport, phases.receive_counts))
        return phases

    def gradient_norm(self, norm_type: float) -> Tensor:
        """Return the norm of all stages' gradients after the last step, the same on every rank; all ranks call it."""
        with self.errors.meeting(all_ranks=True):
            self.failures.at(self.numbers.next_step - 1, Moment.CLIP)
            return self._parts.norms.total(self.numbers.next_step - 1, norm_type, self._context.options.timeout)

    def found_anywhere(self, has_property: bool) -> bool:
        """Return True if ``has_property`` is true on any rank after the last step; all ranks call it."""
        with self.errors.meeting(all_ranks=True):
            return self._parts.norms.found_anywhere(self.numbers.next_step - 1, has_property, self._context.options.timeout)

    @property
    def owners(self) -> Mapping[str, int]:
        """The replica that owns each trainable parameter that a sharded optimizer has, by name."""
        return {} if self._parts.shards is None else self._parts.shards.owners

    def shard(self, owners: Mapping[str, int], digest: int, settings: Sequence[str]) -> None:
        """Bring gradients only to the replicas that own their parameters, from the next step on. All replicas call it.

        Args:
            owners: The replica that owns each trainable parameter that a sharded optimizer has.
            digest: A number that is equal on replicas that shard alike.
            settings: The optimizer's settings, to be equal on all replicas.

        Raises:
            OptionError: They shard other parameters, or with other settings; nothing has changed.
        """
        with self.errors.meeting():
            others = [replica for replica, (one,) in enumerate(self._context.replicas.gather([digest])) if one != digest]
            if others:
                raise OptionError(
                    f"shard: replica {others[0]} shards another optimizer than replica {self.replica}, or other groups: "
                    "expected the same class and the same parameters in the same groups on every rank"
                )
            require_same_settings(self._context.replicas, settings)
            self.go_on_with(owners)

    def go_on_with(self, owners: Mapping[str, int]) -> None:
        """Let parameters have owners on which all replicas have agreed."""
        if owners:
            self._parts.shard(Shards(self._context.replicas, self.trainable, self.state, owners))

    def bring_parameters(self, names: Sequence[str]) -> None:
        """Replace parameters by those of their owners, which have stepped them; all ranks call it."""
        with self.errors.meeting():
            if self._parts.shards is not None:
                self._parts.shards.bring_parameters(names)

    def evaluate(
        self,
        inputs: Batch,
        targets: Batch | None,
        shape: int = FIRST,
        *,
        with_outputs: bool = False,
        to_all: bool = False,
    ) -> tuple[Tensor | None, list[Tensor] | None]:
        """Run the model forward in evaluation mode.

        Args:
            inputs: As in :meth:`step`.
            targets: As in :meth:`step`, or None for the model's outputs instead of the loss.
            shape: The number of the batch's shape.
            with_outputs: Whether to return the outputs beside the loss too.
            to_all: As in :meth:`step`.

        Returns:
            With targets the loss of every microbatch, the mean over the replicas, on every rank. Then the flat outputs of the
            whole batch, if they are wanted or there are no targets. They are on the rank of the last stage, or on all ranks.
        """
        self.numbers.evaluations += 1
        # Evaluations count backwards, so that their messages are never taken for those of a training step.
        step = -self.numbers.evaluations
        of, with_loss = self._shapes[shape], targets is not None
        outputs = self._parts.outputs(of.shape) if with_outputs or not with_loss else {}
        stages = self._parts.factory.evaluation(of.shape, self.state, with_loss=with_loss, with_outputs=with_outputs)
        with self.errors.reporting():
            for compiled in filter(None, (of.shape.larger, of.shape.smaller)):
                for stage in stages:
                    prepare(compiled.eval[stage])
            executor = self._programs.evaluation(stages, of)
            losses = self._parts.run_evaluation(executor, step, inputs, targets, of, stages, outputs)
        flat = self._whole(step, outputs, None, to_all=to_all)
        self.monitor.begin_step()
        return losses, flat

    def timeline(self) -> Timeline | None:
        """Return the measured timeline of the last step, gathered from all workers, on the job's first; None elsewhere.

        All ranks of the job call it. A step must have run. With several replicas there is a row for each worker.
        """
        step, job = self.numbers.next_step - 1, self._context.job
        self.numbers.timelines += 1
        program = self._programs.program
        records = self.monitor.records(step).shifted(job.clock_of(0))
        own = replace(records, rank=job.rank).to_json()
        # Replicas that don't compute for each other may run different programs.
        with self.errors.meeting():
            answers = gather(
                job,
                f"records/{self.numbers.timelines}",
                {"records": own, "program": str(program) if self.rank == 0 and program.is_one_pipeline else None},
                self._context.options.timeout,
                self.errors.check,
            )
        if answers is None:
            return None
        gathered = [Fields(one, "records of a rank") for one in answers]
        measured = [StepRecords.from_json(one.raw("records")) for one in gathered]
        texts = [one.raw("program", None) for one in gathered]
        programs = [Program.parse(text) for text in texts if isinstance(text, str)]
        is_joined = len(programs) > 1
        if is_joined:
            program = join(programs, uneven=True)
        return merge_timelines(program, measured, joined=is_joined)

    @property
    def rank(self) -> int:
        """This rank in its pipeline."""
        return self._context.rank

    @property
    def replica(self) -> int:
        """The replica whose pipeline it is in."""
        return self._context.replica

    @property
    def device(self) -> torch.device:
        """The device of this rank's stages."""
        return self._context.device

    @property
    def failures(self) -> Failures:
        """Has this worker fail as injected."""
        return self._context.failures

    @property
    def monitor(self) -> Monitor:
        """Records this rank's ops and messages."""
        return self._context.monitor

    @property
    def trainable(self) -> Mapping[str, Tensor]:
        """The trainable parameters of this rank's stages by name."""
        return self._parts.end.sums.parameters

    @property
    def kept(self) -> KeptBuffers:
        """Copies of other replicas' buffers in a job that survives their loss."""
        return self._parts.kept

    @property
    def plan(self) -> Plan:
        """The plan of the last step, or of the first one."""
        return self._programs.plan

    @property
    def program(self) -> Program:
        """The program of the last step, without messages; that of the first plan if none has run."""
        return self._programs.program

    def close(self, *, goes_on: bool = False) -> None:
        """End this rank's threads and connections. ``goes_on`` where another worker takes its place and records."""
        if self._watcher is not None:
            self._watcher.close()
        self._parts.close()
        # A lost store may never answer the requests that are under way.
        self.controller.close(LOST_STORE_SECONDS if self._context.membership.has_lost_the_store else CLOSE_SECONDS)
        self.errors.close()
        self._context.transport.close()
        if not goes_on:
            self._telemetry.ended(self.numbers.next_step)

    @property
    def is_alone(self) -> bool:
        """True if no other rank waits for this one's messages or gradients."""
        return self._context.job.world_size == 1

    def _take_reduces(self, reduces: StepReduces) -> None:
        """Take REDUCE of a step on all ranks, on the coordinator's control thread."""
        self.last.reduces = reduces.stages
        self._telemetry.reduced(reduces)

    def _record_link_event(self, event: RdmaEvent) -> None:
        """Record an RDMA event. The transport continues by itself on another path."""
        self.monitor.link(event, time.monotonic())
        self.controller.recorder.emit_now(EventKind.LINK, str(event))
