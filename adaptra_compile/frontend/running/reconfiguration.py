"""Changes of a running pipeline between two steps: other roles, other cut points, or the model that has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from adaptra.collectives.seconds import SumPlan
from adaptra.errors import AdaptraError, OptionError, PipelineError
from adaptra.frontend.followed.following import Following
from adaptra.frontend.planned.open_tails import check_within_step
from adaptra.frontend.planned.stage_planning import PipelineSpec, PlannedPipeline
from adaptra.frontend.running.held_state import HeldState
from adaptra.frontend.running.hosted_batches import HostedBatches
from adaptra.frontend.running.local_workers import LocalWorkers
from adaptra.frontend.running.next_workers import NextWorkers
from adaptra.graph.compile import Captured
from adaptra.graph.inner_compiler import prepare
from adaptra.graph.stages.stages import TrainStage
from adaptra.planning.layouts.layout_change import RoleChange, SplitChange
from adaptra.planning.remedies.bandwidth_remedies import choose_split
from adaptra.planning.synchrony.modes import WithinStep
from adaptra.program.placement import stages_of
from adaptra.program.roles import Roles
from adaptra.runtime.control.calls import CHANGED_MODEL
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.exchange.state_transfer import Handover, exchange, gather_state, give_optimizer
from adaptra.runtime.launch.agreement import agree_here
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.reconfigure.agreement import RESTART_SECONDS, agree_on_roles, gather_costs, share_split
from adaptra.runtime.reconfigure.consent import Consent
from adaptra.runtime.reconfigure.cut_transfer import move_within, new_state, regroup
from adaptra.runtime.reconfigure.transfers import Transfer, cut_transfers, role_transfers, senders_to, sent_by
from adaptra.runtime.worker.stages.gradient_hooks import is_hooked
from adaptra.simulation.cut_points import CutPoint, positions_of

Result = TypeVar("Result")


class Reconfiguration:
    """Changes what the workers of all processes run, all of them at once or none. New workers go on at the same step.

    Args:
        spec: Plans a pipeline after a change of its stages.
        local: The workers of this process.
        batches: The batches of its workers.
        next_workers: Begins those in their place.
        held: The state of this process's stages.
        following: Notices changes of the model; None if the caller does.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        local: LocalWorkers,
        batches: HostedBatches,
        next_workers: NextWorkers,
        held: HeldState,
        following: Following | None,
    ) -> None:
        self._spec = spec
        self._local = local
        self._batches = batches
        self._next_workers = next_workers
        self._held = held
        self._following = following

    def take_roles(self, after: Roles, optimizer: torch.optim.Optimizer) -> None:
        """Change the ranks' roles: see :meth:`adaptra.frontend.api.Pipeline.take_roles`."""
        process, before = self._local.launched.process, self._replicated()
        if (after.stages, len(after.ranks)) != (before.stages, len(before.ranks)):
            raise OptionError(
                f"roles of {len(after.ranks)} ranks and {after.stages} stages: expected {len(before.ranks)} and {before.stages}"
            )
        if after == before:
            return
        (worker,) = self._local.workers
        moving = role_transfers(before, after)
        receivers, senders = sent_by(process, moving), senders_to(process, moving)
        graphs = self._stages_of(after.of(process)[1], self._local.compiled.train)

        def ready() -> tuple[dict[int, Handover], Consent]:
            (held,) = self._leaving("roles", optimizer)
            self._check_mode(self._local.planned)
            for stage in graphs:
                prepare(stage)
            leaving = dict.fromkeys(receivers, held)
            return leaving, Consent.to(len(optimizer.param_groups), leaving)

        leaving = self._agreed("roles", "take_roles", ready)
        with self._restarting("roles", after) as (launched, opened):
            self._local.end()
            state, owners = worker.state, worker.owners
            if senders:
                arrived = exchange(leaving, senders, self._local.launched.everyone)
                state, owners = new_state(graphs, {}, arrived), arrived.owners
                give_optimizer(optimizer, arrived, state)
            self._start(self._local.planned, launched, [state], opened, owners)

    def settle_roles(self, optimizer: torch.optim.Optimizer, horizon: int) -> RoleChange | None:
        """Change to better roles if there are any: see :meth:`adaptra.frontend.api.Pipeline.settle_roles`."""
        roles = self._replicated()
        (worker,) = self._local.workers
        if not worker.last.measured:
            raise PipelineError("no step has run yet: roles are settled by what steps took")
        (held,) = self._agreed("roles", "settle_roles", lambda: (self._leaving("roles", optimizer), Consent()))
        with self._local.called("settle_roles"), self._local.changing("roles"):
            case = replace(worker.initial.case, barrier=worker.plan.case.barrier)
            measured, reduce = tuple(worker.last.measured), self._spec.options.reduce
            sums, group = SumPlan(reduce.of_losses, reduce.bucket), self._local.launched.everyone
            change = agree_on_roles(self._tell, group, roles, self._local.compiled.train, case, measured, held, horizon, sums)
        if change is not None:
            self.take_roles(change.after, optimizer)
            (worker,) = self._local.workers
            worker.controller.recorder.emit_change(change)
        return change

    def take_split(self, split: Sequence[str], optimizer: torch.optim.Optimizer) -> None:
        """Move the cut points: see :meth:`adaptra.frontend.api.Pipeline.take_split`."""
        captured = self._captured()
        self._take_cut(self._cut(captured, captured.positions(split)), optimizer)

    def settle_split(self, optimizer: torch.optim.Optimizer, horizon: int) -> SplitChange | None:
        """Move to a better cut point if there is one: see :meth:`adaptra.frontend.api.Pipeline.settle_split`."""
        captured, (worker, *_) = self._captured(), self._local.workers
        cut = cache(partial(self._cut, captured))  # used to check that the model can be cut, then to change to it
        if not worker.last.measured:
            raise PipelineError("no step has run yet: a split is settled by what steps took")
        held = self._agreed("split", "settle_split", lambda: (self._leaving("split", optimizer), Consent()))
        with self._local.called("settle_split"), self._local.changing("split"):
            plan = worker.plan
            known, bytes_per_byte = gather_costs(self._tell, plan.case.cost, worker.controller.measured_cost, held)

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
            if known is not None and self._local.launched.process == 0:
                case = replace(plan.case, cost=known)
                routed = None if plan.program.is_one_pipeline else plan.predicted
                running = plan.program, plan.delegated, plan.rounded
                decided = choose_split(case, *running, self._local.planned.bandwidth, horizon, moving, routed)
            decided = share_split(self._tell, decided, self._local.compiled.cut_points)
        if decided is None:
            return None
        change, places = decided
        self._take_cut(cut(positions_of(places)), optimizer)
        for one in self._local.workers:
            one.controller.recorder.emit_change(change)
        return change

    def _require_no_guests(self, what: str) -> None:
        self._local.require_running()
        world = self._local.launched.world
        if world.has_guests:
            raise OptionError(
                f"{what}: {len(world.processes)} ranks host the {len(world.hosts)} workers of this job: expected a rank for "
                "each worker, as what moves is a rank's whole state"
            )

    def _captured(self) -> Captured:
        self._require_no_guests("split")
        captured = self._local.compiled.captured
        if captured is None or not self._local.compiled.with_loss:
            raise OptionError(
                "split: the stages were given as modules, or the model's function returns no loss: expected a pipeline that "
                "adaptra.compile cut itself, which can be cut again"
            )
        return captured

    @property
    def _spec_now(self) -> PipelineSpec:
        """What plans in the mode of synchronisation that runs now."""
        return self._spec.under(self._local.synchrony)

    def _cut(self, captured: Captured, positions: tuple[int, ...]) -> PlannedPipeline:
        planned = self._spec_now.prepare(captured.cut(positions))
        self._check_mode(planned)
        return planned

    def _check_mode(self, after: PlannedPipeline) -> None:
        """Refuse stages or roles under which it can't be decided within a step who computes what, as the mode of now has it.

        Raises:
            OptionError, PlanError: As :func:`.open_tails.check_within_step`.
        """
        mode, launched = self._local.synchrony, self._local.launched
        if isinstance(mode, WithinStep):
            check_within_step(mode, after, launched.world, in_order=launched.in_order)

    def _cut_transfers(self, after: Sequence[TrainStage]) -> list[Transfer[str]]:
        """Return the transfers within this process's pipeline to the stages of another cut."""
        launched, placement = self._local.launched, self._spec.placement
        # Workers in one process hand over by place, as there is nothing to send.
        ranks = placement if launched.in_threads else [launched.row[place] for place in placement]
        names_before, names_after = ([one.state_names for one in stages] for stages in (self._local.compiled.train, after))
        return cut_transfers(names_before, names_after, ranks)

    def _take_cut(self, after: PlannedPipeline, optimizer: torch.optim.Optimizer) -> None:
        """Continue with other stages. Every check that may refuse the change runs before anything ends."""
        stages = after.compiled.train
        if after.compiled.cut_points.chosen == self._local.compiled.cut_points.chosen:
            return
        states: list[Mapping[str, Tensor]] = [worker.state for worker in self._local.workers]
        before = [one for state in states for one in state.values()]
        moving = self._cut_transfers(stages)
        process, in_threads = self._local.launched.process, self._local.launched.in_threads

        def ready() -> tuple[tuple[list[Handover], dict[int, Handover]], Consent]:
            held = self._leaving("split", optimizer)
            for stage in (one for worker in self._local.workers for one in self._stages_of(worker.rank, stages)):
                prepare(stage)
            receivers = {} if in_threads else sent_by(process, moving)
            leaving = {receiver: held[0].part(names) for receiver, names in receivers.items()}
            return (held, leaving), Consent.to(len(optimizer.param_groups), leaving)

        held, leaving = self._agreed("split", "take_split", ready)
        with self._restarting("split") as (launched, opened):
            if not in_threads:
                agree_here(launched, after.facts(), self._spec.options.timeout, self._local.check)
            self._local.end()
            if in_threads:
                by_rank = [self._stages_of(worker.rank, stages) for worker in self._local.workers]
                states, arrived = move_within(held, states, by_rank, moving)
            else:
                arrived = [exchange(leaving, senders_to(process, moving), launched.everyone)]
            new_states = [
                new_state(self._stages_of(worker.rank, stages), state, one)
                for worker, state, one in zip(self._local.workers, states, arrived, strict=True)
            ]
            regroup(optimizer, before, new_states, arrived)
            owners = {**arrived[0].owners, **self._local.workers[0].owners}
            self._start(after, launched, new_states, opened, {name: owners[name] for name in new_states[0] if name in owners})

    def follow(self, *, evaluates: bool = False) -> nn.Module | None:
        """Compile anew if the model has changed, and return it then. All ranks call it, before a step or an evaluation.

        Raises:
            As :meth:`adaptra.frontend.followed.following.Following.changed`.
        """
        following, states = self._following, [worker.state for worker in self._local.home]
        change = None if following is None else following.changed(self._local.compiled, states, evaluates=evaluates)
        if following is None or change is None:
            return None
        began = time.monotonic()
        placed = [list(stages_of(worker.rank, self._spec.placement)) for worker in self._local.home]
        shapes = [one for batches in self._batches.all for one in batches.shapes.compiled()]
        after = following.compiled(change, self._local.compiled, shapes, states, placed)
        if after is not None:
            self._take_model(self._spec_now.prepare(after.stages), after.states, f"{CHANGED_MODEL}: {change}")
            for worker in self._local.workers[:1] if self._local.workers[0].rank == 0 else ():
                worker.controller.recorder.emit_now(
                    EventKind.COMPILED, f"a changed model in {time.monotonic() - began:.2f} s: {change}"
                )
        recompile = following.accepted(self._batches.all[0].recompile, self._local.workers[0].numbers.next_step)
        for batches in self._batches.all:
            batches.recompile = recompile
        if after is not None and after.is_replaced:
            self._held.align_copies()
        return following.model()

    def _take_model(self, after: PlannedPipeline, states: Sequence[Mapping[str, Tensor]], call: str) -> None:
        """Continue with other stages of the same cut. No state moves between processes."""

        def ready() -> tuple[None, Consent]:
            self._check_mode(after)
            for stage in (one for worker in self._local.workers for one in self._stages_of(worker.rank, after.compiled.train)):
                prepare(stage)
            return None, Consent()

        self._agreed("change", call, ready, carries_deferred=True)  # each rank keeps its stage's inputs or targets
        with self._restarting("change") as (launched, opened):
            if not launched.in_threads:
                agree_here(launched, after.facts(), self._spec.options.timeout, self._local.check)
            self._local.end()
            self._start(after, launched, states, opened)

    def _start(
        self,
        planned: PlannedPipeline,
        launched: Launch,
        states: Sequence[Mapping[str, Tensor]],
        opened: ExitStack,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        """Continue with new workers, of which other replicas keep what changes in a job that survives.

        Args:
            planned, launched, states, opened: As for :meth:`.next_workers.NextWorkers.begin`.
            owners: The replica that owns each parameter of a sharded optimizer, by name; None if no state has moved.
        """
        states = self._next_workers.begin(planned, launched, states, opened, owners=owners)
        if owners is not None:
            self._local.sharing.moved(states)
            for optimizer, shard in self._local.shards.items():
                shard.moved(optimizer, owners)
        if self._local.redone is not None:
            self._local.on_every_rank(lambda worker: worker.kept.gather(), "change", lambda worker: worker.kept.commit())

    @contextmanager
    def _restarting(self, what: str, roles: Roles | None = None) -> Generator[tuple[Launch, ExitStack]]:
        """Yield what :meth:`.next_workers.NextWorkers.joined` yields of the next world."""
        following = self._local.launched.world.followed_by(roles)
        with self._local.called(f"take_{what}"), self._local.changing(what), self._next_workers.joined(following) as joined:
            yield joined

    def _replicated(self) -> Roles:
        self._require_no_guests("roles")
        roles = self._local.launched.roles
        if roles is None:
            raise OptionError("roles: this job has one replica: expected several, whose ranks can change places")
        return roles

    def _stages_of(self, rank: int, stages: Sequence[TrainStage]) -> list[TrainStage]:
        """Return those of a pipeline's stages that are on one of its ranks."""
        return [stages[stage] for stage in stages_of(rank, self._spec.placement)]

    def _leaving(self, what: str, optimizer: torch.optim.Optimizer) -> list[Handover]:
        """Return the state that each stage of this process would transfer."""
        self._local.sharing.require_alone(what)
        shards = [*self._local.shards]
        if (shards or self._local.workers[0].owners) and shards != [optimizer]:
            raise OptionError(
                f"{what}: this pipeline has {len(shards)} sharded optimizers, and was given a "
                f"{type(optimizer).__name__}: expected a single one, and that one, where parameters move between ranks"
            )
        hooked = next(
            (name for worker in self._local.workers for name, one in worker.trainable.items() if is_hooked(one)), None
        )
        if hooked is not None:
            raise OptionError(
                f"{what}: {hooked} has a gradient hook, which stays with this process: expected parameters without hooks where "
                "they move between ranks; remove it by its handle, and register it of pipe.parameters() afterwards"
            )
        return [gather_state(worker.state, optimizer, worker.owners) for worker in self._local.workers]

    def _tell(self, text: str) -> list[str]:
        """Tell all ranks of the job a text, and return that of each, by rank."""
        return self._local.launched.tell("change", text, self._spec.options.timeout, self._local.check)

    def _agreed(
        self, what: str, call: str, ready: Callable[[], tuple[Result, Consent]], *, carries_deferred: bool = False
    ) -> Result:
        """Prepare a move and wait until every rank can make it: see :meth:`.local_workers.LocalWorkers.agreed`.

        Raises:
            OptionError: Sites update by themselves.
        """
        if self._local.launched.world.sites > 1:
            raise OptionError(
                f"{call}: sites update by themselves under Options(synchrony=...), and what they have learnt "
                "since their last exchange does not move: expected the model, roles and cut points of the first step"
            )
        timeout = self._spec.options.timeout
        return self._local.agreed(what, call, ready, timeout, carries_deferred=carries_deferred)
