"""A running pipeline: the workers of this process, their steps, and changes of roles and cut points."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from adaptra.collectives.seconds import SumPlan
from adaptra.errors import AdaptraError, OptionError, PeerLostError, PipelineError
from adaptra.frontend.arguments.shared_models import Sharing
from adaptra.frontend.followed.following import Following
from adaptra.frontend.losses.batch_look import BatchLook
from adaptra.frontend.saved.fitting_model import FittingModel, fitting_model
from adaptra.frontend.saved.model_names import ModelNames
from adaptra.frontend.shapes.agreement import agree_on_shape
from adaptra.frontend.shapes.kept import most_shapes
from adaptra.frontend.shapes.recompile import Recompile
from adaptra.frontend.shapes.shapes import NewShape, ShapedBatch, Shapes
from adaptra.frontend.stage_planning import PipelineSpec, PlannedPipeline
from adaptra.frontend.worker_factory import open_recorder
from adaptra.graph import CompiledStages
from adaptra.graph.capture.collectives import refuse_context_parallel
from adaptra.graph.compile import Captured
from adaptra.graph.inner_compiler import prepare
from adaptra.graph.ops.autocast import refuse_autocast
from adaptra.graph.stages.stages import TrainStage
from adaptra.planning.layouts.layout_change import RoleChange, SplitChange
from adaptra.planning.remedies.bandwidth_remedies import BandwidthOptions, choose_split
from adaptra.program.placement import stages_of
from adaptra.program.roles import Roles
from adaptra.runtime.control.calls import CHANGED_MODEL, Calls
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.exchange.state_transfer import Handover, exchange, gather_state, give_optimizer
from adaptra.runtime.launch.agreement import agree
from adaptra.runtime.launch.launch import Job, Launch
from adaptra.runtime.reconfigure.agreement import RESTART_SECONDS, agree_on_roles, gather_costs, share_split
from adaptra.runtime.reconfigure.consent import Consent, check_consents
from adaptra.runtime.reconfigure.cut_transfer import move_within, new_state, regroup
from adaptra.runtime.reconfigure.transfers import Transfer, cut_transfers, role_transfers, senders_to, sent_by
from adaptra.runtime.telemetry.recorder import Recorder
from adaptra.runtime.worker.batch import split_batch
from adaptra.runtime.worker.stages.gradient_hooks import is_hooked
from adaptra.runtime.worker.step.shapes import FIRST, StepShape
from adaptra.runtime.worker.worker import Batch, Worker
from adaptra.simulation.cut_points import CutPoint, positions_of

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Session:
    """A compiled pipeline: its stages and the workers of this process.

    Args:
        spec: Plans a pipeline after a change of cut points.
        planned: The planned pipeline with which the workers were started.
        launched: The ranks of this process.
        workers: One worker per rank of this process, in order of ranks.
        recorder: The recorder of the workers' events.
        sharing: The pipeline's use of the model's tensors.
        recompile: Compiles the model for batches of other shapes; None if it can't be.
        look: Looks at each batch of a step; None if no mean of microbatches is taken.
        following: Notices changes of the model; None if the caller does.
        names: What the model's state_dict has beside its tensors.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        planned: PlannedPipeline,
        launched: Launch,
        workers: Sequence[Worker],
        recorder: Recorder,
        sharing: Sharing,
        recompile: Recompile | None = None,
        look: BatchLook | None = None,
        following: Following | None = None,
        *,
        names: ModelNames,
    ) -> None:
        self.names = names
        self._spec = spec
        self.look = look
        self._following = following
        self._recompile = recompile
        self.reduction = spec.reduction
        self.microbatches = spec.microbatches
        self._failure: BaseException | None = None
        self._calls: Calls | None = None
        self._new_shapes = 0
        if launched.job is not None and launched.job.ranks > 1:
            end_by = weakref.WeakMethod(self._end_by)
            self._calls = Calls(launched.job.store, launched.job.rank, launched.job.ranks, lambda error: _call(end_by, error))
            weakref.finalize(self, self._calls.close)
        self._run_by(planned, launched, workers, recorder)
        self._sharing = sharing
        sharing.begin(self)

    def _end_by(self, error: Exception) -> None:
        """End all waits of this process, since ranks have called different methods."""
        for worker in self.workers:
            worker.abort(error)

    def _run_by(self, planned: PlannedPipeline, launched: Launch, workers: Sequence[Worker], recorder: Recorder) -> None:
        self._planned = planned
        self._threads = ThreadPoolExecutor(len(workers), "adaptra-rank") if len(workers) > 1 else None
        self.launched = launched
        self.workers = tuple(workers)
        if self._calls is not None:
            for worker in self.workers:
                worker.explain = self._calls.explain
        self._ranks = {worker.rank for worker in workers}
        self.shapes = Shapes(
            None if self._recompile is None else self._compile_again,
            self.compiled,
            self.microbatches,
            most_shapes(self._spec.options.shapes, self.compiled),
            self._tell_of_shape,
            self._add_shape,
            self._drop_shape,
        )
        # Also if the process ends without a close, since the transports' threads must not outlive the interpreter.
        self._end = weakref.finalize(self, _end, self.workers, self._threads, recorder, launched)

    @property
    def is_launched(self) -> bool:
        """Whether the ranks are processes, each with a part of what a step returns."""
        return self.launched.job is not None

    @property
    def compiled(self) -> CompiledStages:
        """The stages."""
        return self._planned.compiled

    @property
    def has_padded_ops(self) -> bool:
        """Whether ops sleep: on emulated devices, or by faults that slow workers."""
        options = self._spec.options
        return options.emulate is not None or any(one.split()[:1] == ["slow"] for one in options.faults)

    @property
    def bandwidth(self) -> BandwidthOptions:
        """The remedies available against edges whose bandwidth limits the step."""
        return self._planned.bandwidth

    @property
    def alone(self) -> tuple[str, ...]:
        """Lines that say which microbatches no other replica computes, and why."""
        return self._planned.alone

    def take_roles(self, after: Roles, optimizer: torch.optim.Optimizer) -> None:
        """Change the ranks' roles: see :meth:`adaptra.frontend.api.Pipeline.take_roles`."""
        job, before = self._replicated()
        if (after.stages, len(after.ranks)) != (before.stages, len(before.ranks)):
            raise OptionError(
                f"roles of {len(after.ranks)} ranks and {after.stages} stages: expected {len(before.ranks)} and {before.stages}"
            )
        if after == before:
            return
        (worker,) = self.workers
        moving = role_transfers(before, after)
        receivers, senders = sent_by(job.rank, moving), senders_to(job.rank, moving)
        graphs = self._stages_of(after.of(job.rank)[1], self.compiled.train)

        def ready() -> tuple[dict[int, Handover], Consent]:
            (held,) = self._held("roles", optimizer)
            for stage in graphs:
                prepare(stage)
            leaving = dict.fromkeys(receivers, held)
            return leaving, Consent.to(len(optimizer.param_groups), leaving)

        leaving = self._agreed("roles", "take_roles", ready)
        with self._restarting("roles", partial(job.join, after)) as (launched, opened):
            self._end()
            state = worker.state
            if senders:
                arrived = exchange(leaving, senders, job.everyone)
                state = new_state(graphs, {}, arrived)
                give_optimizer(optimizer, arrived, state)
            self._start(self._planned, launched, [state], opened)

    def settle_roles(self, optimizer: torch.optim.Optimizer, horizon: int) -> RoleChange | None:
        """Change to better roles if there are any: see :meth:`adaptra.frontend.api.Pipeline.settle_roles`."""
        job, roles = self._replicated()
        (worker,) = self.workers
        if not worker.measured:
            raise PipelineError("no step has run yet: roles are settled by what steps took")
        (held,) = self._agreed("roles", "settle_roles", lambda: (self._held("roles", optimizer), Consent()))
        with self._called("settle_roles"), self._changing("roles"):
            case, measured, reduce = worker.initial.case, tuple(worker.measured), self._spec.options.reduce
            sums = SumPlan(reduce.algorithm, reduce.bucket)
            change = agree_on_roles(job.everyone, roles, self.compiled.train, case, measured, held, horizon, sums)
        if change is not None:
            self.take_roles(change.after, optimizer)
            (worker,) = self.workers
            worker.controller.emit_change(change)
        return change

    def take_split(self, split: Sequence[str], optimizer: torch.optim.Optimizer) -> None:
        """Move the cut points: see :meth:`adaptra.frontend.api.Pipeline.take_split`."""
        captured = self._captured()
        self._take_cut(self._cut(captured, captured.positions(split)), optimizer)

    def settle_split(self, optimizer: torch.optim.Optimizer, horizon: int) -> SplitChange | None:
        """Move to a better cut point if there is one: see :meth:`adaptra.frontend.api.Pipeline.settle_split`."""
        captured, (worker, *_) = self._captured(), self.workers
        cut = cache(partial(self._cut, captured))  # used to check that the model can be cut, then to change to it
        if not worker.measured:
            raise PipelineError("no step has run yet: a split is settled by what steps took")
        held = self._agreed("split", "settle_split", lambda: (self._held("split", optimizer), Consent()))
        with self._called("settle_split"), self._changing("split"):
            job, plan = self.launched.job, worker.plan
            group = None if job is None else job.everyone
            known, bytes_per_byte = gather_costs(group, plan.case.cost, worker.controller.measured_cost, held)

            def moving(places: Sequence[CutPoint]) -> tuple[float, float] | None:
                began = time.monotonic()
                try:
                    stages = cut(positions_of(places)).compiled.train
                except AdaptraError:
                    return None  # for example, two stages would change one buffer
                names = {one.item for one in self._cut_transfers(stages)}
                moved = bytes_per_byte * sum(captured.sizes[name] for name in names)
                return RESTART_SECONDS + time.monotonic() - began, moved

            decided: tuple[SplitChange, tuple[CutPoint, ...]] | None = None
            if known is not None and (job is None or job.rank == 0):
                case = replace(plan.case, cost=known)
                routed = None if plan.program.is_one_pipeline else plan.predicted
                running = plan.program, plan.delegated, plan.rounded
                decided = choose_split(case, *running, self.bandwidth, horizon, moving, routed)
            decided = share_split(group, decided, self.compiled.cut_points)
        if decided is None:
            return None
        change, places = decided
        self._take_cut(cut(positions_of(places)), optimizer)
        for one in self.workers:
            one.controller.emit_change(change)
        return change

    def _captured(self) -> Captured:
        self.require_running()
        captured = self.compiled.captured
        if captured is None or not self.compiled.with_loss:
            raise OptionError(
                "split: the stages were given as modules, or the model's function returns no loss: expected a pipeline that "
                "adaptra.compile cut itself, which can be cut again"
            )
        return captured

    def _cut(self, captured: Captured, positions: tuple[int, ...]) -> PlannedPipeline:
        return self._spec.prepare(captured.cut(positions))

    def _cut_transfers(self, after: Sequence[TrainStage]) -> list[Transfer[str]]:
        """Return the transfers within this process's pipeline to the stages of another cut."""
        replicas, roles, placement = self.launched.replicas, self.launched.roles, self._spec.placement
        row = range(len(placement)) if roles is None else roles.pipeline(0 if replicas is None else replicas.index)
        ranks = [row[rank] for rank in placement]
        names_before, names_after = ([one.state_names for one in stages] for stages in (self.compiled.train, after))
        return cut_transfers(names_before, names_after, ranks)

    def _take_cut(self, after: PlannedPipeline, optimizer: torch.optim.Optimizer) -> None:
        """Continue with other stages. Every check that may refuse the change runs before anything ends."""
        stages = after.compiled.train
        if after.compiled.cut_points.chosen == self.compiled.cut_points.chosen:
            return
        states: list[Mapping[str, Tensor]] = [worker.state for worker in self.workers]
        before = [one for state in states for one in state.values()]
        moving = self._cut_transfers(stages)
        job = self.launched.job

        def ready() -> tuple[tuple[list[Handover], dict[int, Handover]], Consent]:
            held = self._held("split", optimizer)
            for stage in (one for worker in self.workers for one in self._stages_of(worker.rank, stages)):
                prepare(stage)
            receivers = {} if job is None else sent_by(job.rank, moving)
            leaving = {receiver: held[0].part(names) for receiver, names in receivers.items()}
            return (held, leaving), Consent.to(len(optimizer.param_groups), leaving)

        held, leaving = self._agreed("split", "take_split", ready)
        with self._restarting("split", self.launched.again) as (launched, opened):
            if job is not None:
                agree(launched.transports[0], "pipeline", after.facts(), self._spec.options.timeout)
            self._end()
            if job is None:
                by_rank = [self._stages_of(worker.rank, stages) for worker in self.workers]
                states, arrived = move_within(held, states, by_rank, moving)
            else:
                arrived = [exchange(leaving, senders_to(job.rank, moving), job.everyone)]
            made = [
                new_state(self._stages_of(worker.rank, stages), state, one)
                for worker, state, one in zip(self.workers, states, arrived, strict=True)
            ]
            regroup(optimizer, before, made, arrived)
            self._start(after, launched, made, opened)

    def follow(self, *, evaluates: bool = False) -> nn.Module | None:
        """Compile anew if the model has changed, and return it then. All ranks call it, before a step or an evaluation.

        Raises:
            As :meth:`adaptra.frontend.followed.following.Following.changed`.
        """
        following, states = self._following, [worker.state for worker in self.workers]
        found = None if following is None else following.changed(self.compiled, states, evaluates=evaluates)
        if following is None or found is None:
            return None
        began = time.monotonic()
        placed = [list(stages_of(worker.rank, self._spec.placement)) for worker in self.workers]
        after = following.compiled(found, self.compiled, self.shapes.compiled(), states, placed)
        if after is not None:
            self._take_model(self._spec.prepare(after.stages), after.states, f"{CHANGED_MODEL}: {found}")
            for worker in self.workers[:1] if self.workers[0].rank == 0 else ():
                worker.controller.emit_shape_event(
                    EventKind.COMPILED, f"a changed model in {time.monotonic() - began:.2f} s: {found}"
                )
        self._recompile = following.accepted(self._recompile, self.workers[0].next_step)
        if after is not None and after.is_replaced:
            self.align_copies()
        return following.model()

    def _take_model(self, after: PlannedPipeline, states: Sequence[Mapping[str, Tensor]], call: str) -> None:
        """Continue with other stages of the same cut. No state moves between processes."""

        def ready() -> tuple[None, Consent]:
            for stage in (one for worker in self.workers for one in self._stages_of(worker.rank, after.compiled.train)):
                prepare(stage)
            return None, Consent()

        self._agreed("change", call, ready)
        with self._restarting("change", self.launched.again) as (launched, opened):
            if self.launched.job is not None:
                agree(launched.transports[0], "pipeline", after.facts(), self._spec.options.timeout)
            self._end()
            self._start(after, launched, states, opened, has_moved=False)

    def _start(
        self,
        planned: PlannedPipeline,
        launched: Launch,
        states: Sequence[Mapping[str, Tensor]],
        opened: ExitStack,
        *,
        has_moved: bool = True,
    ) -> None:
        """Continue with new workers at the step at which the old ones ended. ``opened`` then no longer closes anything."""
        recorder = open_recorder(self._spec.options, launched)
        opened.callback(recorder.close)
        (before, *_) = self.workers
        workers = planned.factory.workers(launched, recorder, states, planned.initial, before.next_step)
        for worker, earlier in zip(workers, self.workers, strict=True):
            worker.steps_before = before.steps_before
            worker.controller.go_on_after(earlier.controller)
        opened.pop_all()
        self._run_by(planned, launched, workers, recorder)
        if has_moved:
            self._sharing.moved(states)

    @contextmanager
    def _restarting(self, what: str, join: Callable[[], Launch]) -> Generator[tuple[Launch, ExitStack]]:
        """Yield the connections of new workers, and a stack that closes them unless :meth:`_start` is reached."""
        with self._called(f"take_{what}"), self._changing(what), ExitStack() as opened:
            launched = join()
            for transport in launched.transports:
                opened.callback(transport.close)
            yield launched, opened

    def _agreed(self, what: str, call: str, ready: Callable[[], tuple[Result, Consent]]) -> Result:
        """Prepare a move and wait until every rank of the job can move. Otherwise no rank moves.

        Args:
            what: The kind of move, for error texts.
            call: The method of the pipeline that the user has called. All ranks call it.
            ready: Prepares the move, and returns its result and this process's consent.

        Returns:
            The result of ``ready``.

        Raises:
            StateError: A rank can't move. The pipeline continues as before.
        """
        job = self.launched.job

        def meet(consent: Consent) -> list[str]:
            if job is None:
                return []
            with self._called(call), self._changing(what):
                return job.meet(self._spec.options.timeout, self.workers[0].check, consent.encode())

        try:
            found, consent = ready()
        except Exception as error:
            meet(Consent.refused(error))
            raise
        check_consents(what, meet(consent))
        return found

    @contextmanager
    def _changing(self, what: str) -> Generator[None]:
        """Fail the pipeline on any error in this context, since all ranks of the job make the change together."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            if isinstance(error, RuntimeError) and not isinstance(error, AdaptraError):
                self._failure = PeerLostError(f"{what}: a rank is lost: {error}")
                raise self._failure from error
            raise

    def _replicated(self) -> tuple[Job, Roles]:
        self.require_running()
        job, roles = self.launched.job, self.launched.roles
        if job is None or roles is None:
            raise OptionError("roles: this job has one replica: expected several, whose ranks can change places")
        return job, roles

    def _stages_of(self, rank: int, stages: Sequence[TrainStage]) -> list[TrainStage]:
        """Return those of a pipeline's stages that are on one of its ranks."""
        return [stages[stage] for stage in stages_of(rank, self._spec.placement)]

    def _held(self, what: str, optimizer: torch.optim.Optimizer) -> list[Handover]:
        """Return the state that each stage of this process would transfer."""
        self._sharing.require_alone(what)
        hooked = next((name for worker in self.workers for name, one in worker.trainable.items() if is_hooked(one)), None)
        if hooked is not None:
            raise OptionError(
                f"{what}: {hooked} has a gradient hook, which stays with this process: expected parameters without hooks where "
                "they move between ranks; remove it by its handle, and register it of pipe.parameters() afterwards"
            )
        return [gather_state(worker.state, optimizer) for worker in self.workers]

    @property
    def state(self) -> dict[str, Tensor]:
        """Return the state of this process's stages. For a parameter with several copies, the first stage's copy counts."""
        merged: dict[str, Tensor] = {}
        for worker in self.workers:
            merged = {**worker.state, **merged}
        return merged

    def align_copies(self) -> None:
        """Copy the first rank's values to the copies on other ranks. All ranks call it. One process has nothing to align."""
        if self._has_copies:
            self.on_every_rank(Worker.align_copies, "load_state_dict")

    @property
    def _has_copies(self) -> bool:
        """Return whether ranks of other processes have copies of this process's state, and all can compare them."""
        return self.launched.job is not None and self.workers[0].shares_values and self._end.alive and self._failure is None

    def full_state(self) -> dict[str, Tensor]:
        """Return the whole model's state on the job's first rank: see :meth:`adaptra.frontend.api.Pipeline.full_state_dict`."""
        if self.launched.job is None:
            self.require_running()
            found = {name: tensor.detach().cpu().clone() for name, tensor in self.state.items()}
        else:
            replicas, roles = self.launched.replicas, self.launched.roles
            replica, rank = (0, 0) if roles is None else roles.of(0)
            takes_part = replicas is None or replicas.index == replica
            (found,) = self.on_every_rank(
                lambda worker: worker.full_state(rank, takes_part, from_first=replica > 0), "full_state_dict"
            )
        return self.named(found) if found else {}

    def saved_state(self) -> dict[str, Tensor]:
        """Return the state of this process's stages that a checkpoint saves, by the stages' own names.

        Buffers that differ between replicas are copies of the first replica's. All ranks call it.
        """
        if self.launched.replicas is None:
            return self.state
        (first,) = self.on_every_rank(Worker.buffers_of_first_replica, "TrainingState.state_dict")
        return {**self.state, **first}

    @property
    def training_step(self) -> int:
        """The number of steps of the training, including those of earlier pipelines that it continues."""
        return self.workers[0].training_step

    def go_on_at(self, step: int) -> None:
        """Set the number of the next step of the training, on which random numbers depend."""
        for worker in self.workers:
            worker.steps_before = step - worker.next_step

    def named(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of the stages' state that is in the model's state_dict, under all its names there."""
        self.names.require_plain()
        found: dict[str, Any] = {name: state[one].detach() for name, one in self.compiled.saved.items() if one in state}
        return found | self.names.extras()

    def fitting(self, state: Mapping[str, Any], *, strict: bool) -> FittingModel:
        """Return what this process loads of a state of the model. Nothing changes yet.

        Raises:
            StateError: It does not fit.
        """
        return fitting_model(self.names, self.compiled, self.state, state, strict=strict)

    @property
    def saved_as(self) -> dict[str, str]:
        """Return the first name in the model's state_dict of each tensor of the stages; its own if it has none there."""
        names = {canonical: canonical for canonical in self.compiled.aliases.values()}
        return names | {canonical: name for name, canonical in reversed(list(self.compiled.saved.items()))}

    def batch(
        self,
        args: tuple[Any, ...],
        targets: Any,
        kwargs: Mapping[str, Any],
        *,
        with_loss: bool = True,
        training: bool = True,
    ) -> ShapedBatch:
        """Return a batch in microbatches. A shape that no batch had before is compiled first.

        Args:
            args, kwargs: The model's arguments.
            targets: The loss's targets.
            with_loss: Whether the loss is wanted, and with it the targets.
            training: Whether a step trains on it. A shape that is only evaluated gets no training graphs.

        Raises:
            BatchError: The batch is not one that this pipeline takes.
        """
        formats = self.compiled.inputs, self.compiled.targets
        needs_targets = with_loss and bool(formats[1].specs)
        is_whole = bool(args or kwargs) and (targets is not None or not needs_targets)
        if self.shapes.can_vary and is_whole:
            inputs = formats[0].flatten(args, kwargs, any_size=True)
            wanted = formats[1].flatten(targets, any_size=True) if with_loss else []
            if not self.shapes.is_first(inputs, wanted):
                whole = args, kwargs, targets if with_loss else None
                found = self.shapes.find(inputs, wanted, whole, with_loss=with_loss, training=training)
                here = found.inputs if self._has(0) else (), found.targets if self._has(-1) else ()
                return replace(found, inputs=here[0], targets=here[1])
            split = self._split_inputs(inputs), self._split_targets(wanted) if with_loss else ()
        else:
            split = self.split_inputs(args, kwargs), self.split_targets(targets) if with_loss else ()
        self.shapes.use_first()
        return ShapedBatch(FIRST, *split, (), self.compiled)

    def _has(self, stage: int) -> bool:
        """Return whether a stage is in this process."""
        return self._spec.placement[stage] in self._ranks

    def _compile_again(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any, with_loss: bool, training: bool
    ) -> CompiledStages:
        """Return the stages for a microbatch of another shape."""
        assert self._recompile is not None, "the model can be compiled again"
        how = {"with_loss": with_loss, "training": training}
        return self._spec.lowered(self._recompile.stages(self.compiled, args, kwargs, targets, **how))

    def _add_shape(self, new: NewShape) -> StepShape:
        """Plan for a new shape of batch, and have the workers prepare for it.

        Raises:
            BatchError: Another rank of the replica has a batch of another shape.
        """
        self._new_shapes += 1
        agree_on_shape(new, self._new_shapes, self.launched, self.workers[0], self._calls, self._spec.options.timeout)
        larger, smaller = new.larger, new.smaller
        # Where nothing trains, no program is asked for: forwards run in their own order.
        programs = self._spec.programs_of(self.compiled, larger if larger.trains else self.compiled, len(new.rows))
        shape = StepShape(new.number, new.code, new.rows, larger, smaller, programs, programs.relative)
        for worker in self.workers:
            for stage in stages_of(worker.rank, self._spec.placement) if shape.trains else ():
                for compiled in filter(None, (larger, smaller)):
                    prepare(compiled.train[stage])
            worker.add_shape(shape)
        return shape

    def _tell_of_shape(self, kind: EventKind | None, text: str) -> None:
        (worker, *_) = self.workers
        if worker.rank != 0:
            return
        if kind is None:
            logger.warning(text)
        else:
            worker.controller.emit_shape_event(kind, text)

    def _drop_shape(self, number: int) -> None:
        for worker in self.workers:
            worker.drop_shape(number)

    def split_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """Return the microbatches of a batch's inputs, or nothing if the first stage is not in this process."""
        return self._split_inputs(self.compiled.inputs.flatten(args, kwargs)) if self._has(0) else ()

    def _split_inputs(self, flat: Sequence[Tensor]) -> Batch:
        return split_batch(flat, self.compiled.inputs.specs, self.microbatches, "inputs") if self._has(0) else ()

    def split_targets(self, targets: Any) -> Batch:
        """Return the microbatches of a batch's targets, or nothing if the last stage is not in this process."""
        return self._split_targets(self.compiled.targets.flatten(targets)) if self._has(-1) else ()

    def _split_targets(self, flat: Sequence[Tensor]) -> Batch:
        return split_batch(flat, self.compiled.targets.specs, self.microbatches, "targets") if self._has(-1) else ()

    def prepare_outputs(self, batch: ShapedBatch) -> None:
        """Make the graph that returns the model's outputs of such a batch, if the last stage is in this process.

        Raises:
            OptionError: An output is not there on the last stage. The text names it.
        """
        if self._has(-1):
            batch.outputs_by.train[-1].forward_with_outputs()

    def compare_rows(self, call: str, inputs: Any, targets: Any, kwargs: Mapping[str, Any]) -> None:
        """Start a comparison of this call's rows with those of other processes' ranks. ``call`` is the user's method."""
        if self.launched.job is not None:
            positional = {"inputs": inputs, "targets": targets}
            given = {name: one for name, one in positional.items() if one is not None}
            self.workers[0].compare_rows(call, {**kwargs, **given})

    @contextmanager
    def at_the_door(self) -> Generator[None]:
        """Check a batch within this context, before anything runs.

        If all ranks are in this process, a refused batch changes nothing. Ranks of other processes may already wait for this
        one's messages, so a refused batch then ends the pipeline on all of them.
        """
        self.require_running()
        with self._reporting_errors(others_wait=not self.workers[0].is_alone):
            refuse_autocast("a pipeline's step")
            refuse_context_parallel("a pipeline's step")
            yield

    def agreed_to_load(self, fitting: Callable[[], Result], call: str) -> Result:
        """Return the part of a state to load here. If ranks have copies, all of them load it or none does.

        A whole training state is loaded by all ranks or by none in any case. ``call`` is the user's method.
        """
        is_open = self._end.alive and self._failure is None
        is_common = self._has_copies or (call != "load_state_dict" and self.is_launched and is_open)
        return self._agreed("state_dict", call, lambda: (fitting(), Consent())) if is_common else fitting()

    @contextmanager
    def _reporting_errors(self, *, others_wait: bool) -> Generator[None]:
        try:
            yield
        except Exception as error:
            if self._threads is None and others_wait:
                self._failure = error
                self.workers[0].fail(error)
            raise

    @property
    def is_open(self) -> bool:
        """Return whether the session has not been closed."""
        return self._end.alive

    def require_running(self) -> None:
        """Refuse further calls after the end.

        Raises:
            PipelineError: The pipeline is closed or has failed.
        """
        if not self._end.alive and self._failure is None:
            raise PipelineError("this pipeline is closed: call adaptra.compile for another one")
        if self._failure is not None:
            raise PipelineError(
                "this pipeline has failed and can't go on: close it, call adaptra.compile again and load the last checkpoint; "
                f"it failed by {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    @contextmanager
    def _called(self, call: str) -> Generator[None]:
        """Check within this context that the ranks of all processes call the same method: see :class:`Calls`."""
        with nullcontext() if self._calls is None else self._calls.during(call):
            yield

    def on_every_rank(self, run: Callable[[Worker], Result], call: str) -> list[Result]:
        """Run a function on every worker of this process, each on its own thread, and wait for all.

        Args:
            run: The function to run.
            call: The method of the pipeline that the user has called. All ranks call it.

        Raises:
            PipelineError: The pipeline is closed or has failed.
            Exception: The error of the first worker that failed; the others' errors only say that it failed. The pipeline has
                failed then.
        """
        self.require_running()
        try:
            with self._called(call):
                found = self._run(run)
            self._sharing.has_trained = self.workers[0].next_step > 0
            return found
        except BaseException as error:
            self._failure = error
            raise

    def _run(self, run: Callable[[Worker], Result]) -> list[Result]:
        if self._threads is None:
            return [run(self.workers[0])]
        run_as_here = _with_threads_of_this_one(run)
        futures = [self._threads.submit(run_as_here, worker) for worker in self.workers]
        try:
            errors = [error for error in (future.exception() for future in futures) if error is not None]
        except BaseException as error:
            # Ctrl-C, for example, reaches this thread only, and the ranks would continue without it.
            for worker in self.workers:
                worker.abort(PipelineError(f"the step was interrupted: {type(error).__name__}"))
            raise
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLostError)), errors[0])
        return [future.result() for future in futures]

    def close(self) -> None:
        """End all workers. It may be called again."""
        if self._calls is not None:
            self._calls.close(informs=True)
        was_open = self._end.alive
        self._end()
        if was_open and self._failure is None and self.launched.job is not None:
            self.launched.job.close()


def _with_threads_of_this_one(run: Callable[[Worker], Result]) -> Callable[[Worker], Result]:
    """Return the same function for another thread, with this thread's number of threads for kernels.

    Libraries below torch, such as MKL, use torch's number only on threads on which it was set or read. On other threads they
    use their own number, which changes the order of sums.
    """
    count = torch.get_num_threads()

    def run_so(worker: Worker) -> Result:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        return run(worker)

    return run_so


def _call(method: weakref.WeakMethod[Callable[[Exception], None]], error: Exception) -> None:
    if (bound := method()) is not None:
        bound(error)


def _end(workers: Sequence[Worker], threads: ThreadPoolExecutor | None, recorder: Recorder, launched: Launch) -> None:
    """Close all workers of this process."""
    for worker in workers:
        worker.leave()
    for worker in workers:
        worker.close()
    if threads is not None:
        threads.shutdown()
    recorder.close()
    if not any(worker.has_failed for worker in workers):
        launched.end()
