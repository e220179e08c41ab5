"""Planning for stages: everything needed to plan and start a pipeline, except the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from adaptra.frontend.arguments.module_digests import module_digests
from adaptra.frontend.planned.activation_memory import in_bytes, limits_free, limits_within, predicted_peaks
from adaptra.frontend.planned.first_plan import first_plan, two_phase_plan
from adaptra.frontend.planned.given_routes import around_guests, changed_buffers, kept_at_home, routed_plan
from adaptra.frontend.planned.worker_factory import WorkerFactory
from adaptra.frontend.shapes.shape_programs import ShapePrograms
from adaptra.graph import CompiledStages
from adaptra.graph.estimated_cost import estimated_cost
from adaptra.graph.inner_compiler import compiled_by
from adaptra.graph.round_messages import round_messages
from adaptra.planning.remedies.bandwidth_remedies import BandwidthOptions, Remedies, find_remedies
from adaptra.planning.routes.steady_steps import timing_of
from adaptra.program import Program
from adaptra.program.placement import has_several
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.control.plans.plan import Edges, Plan
from adaptra.runtime.injection.failures import FailureLog
from adaptra.runtime.injection.faults import Fault
from adaptra.runtime.options import Options
from adaptra.runtime.options.stage_options import Synchrony
from adaptra.runtime.worker.stages.loss_reduction import Reduction
from adaptra.runtime.world.world import World
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.sizes import MemoryLimit, MemoryUnit

PLANNER_SHARE: Final = 0.5
"""Time limit of a search, as a fraction of a step. A plan found before the next step ends takes effect a step sooner."""

DRAFT_SHARE: Final = 0.1
"""The same limit for speculative plans, since all ranks must be ready for the plan before the next step ends."""


@dataclass(frozen=True, slots=True)
class PlannedPipeline:
    """The stages and the first plan, which every rank computes on its own before its worker starts.

    Attributes:
        factory: The factory of the workers.
        initial: The first plan.
        bandwidth: The remedies available against edges whose bandwidth limits the step.
        alone: Lines that say which microbatches no other replica computes, and why; empty if there are none.
    """

    factory: WorkerFactory
    initial: Plan
    bandwidth: BandwidthOptions
    alone: tuple[str, ...] = ()

    @property
    def compiled(self) -> CompiledStages:
        """The stages."""
        return self.factory.compiled

    def facts(self) -> dict[str, object]:
        """Return the values that must be equal on all ranks, as JSON values, by what they are."""
        facts: dict[str, object] = {}
        captured = self.compiled.captured
        for mode, graph in () if captured is None else (("training", captured.flat), ("evaluation", captured.eval_flat)):
            for name, digest in module_digests(graph).items():
                facts[f"the ops in {mode} of {f'module {name}' if name else 'the model itself or its loss'}"] = digest
        for one in self.compiled.train:
            described = [str(one.inputs), str(one.outputs), *one.parameters, *one.buffers]
            facts[f"the messages or state of stage {one.index}"] = described
        facts["the plan"] = [str(self.initial.program), [list(edge) for edge in self.initial.delegated]]
        return facts


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """The arguments for planning a pipeline of given stages. It has no reference to the model, so it can be kept.

    Attributes:
        placement, microbatches, with_loss, faults, options, reduction: As in
            :class:`adaptra.frontend.arguments.arguments.CompileArguments`.
        memory: The user's limit of activations, or None.
        free: The free bytes of each rank's device. They are the limit of plans if ``memory`` is None.
        replicas: The number of replicas of the job.
        in_order: Whether a transport has one queue for all messages between two ranks, as NCCL has.
        is_to_come: Whether the stages' parameters had no memory yet when the free bytes were counted.
        guests: The workers whose processes are at home in other replicas.
        crowd: Per rank of a pipeline, the most workers that a process hosts there.
        failed: The injected failures that have happened in this process.
    """

    placement: tuple[int, ...]
    microbatches: int
    memory: MemoryLimit | None
    with_loss: bool
    faults: Sequence[Fault]
    options: Options
    reduction: Reduction
    free: tuple[int, ...] | None = None
    replicas: int = 1
    in_order: bool = False
    is_to_come: bool = False
    guests: frozenset[int] = frozenset()
    crowd: tuple[int, ...] = ()
    failed: FailureLog = field(default_factory=FailureLog)

    def prepare(self, compiled: CompiledStages) -> PlannedPipeline:
        """Plan for these stages.

        Raises:
            OptionError: The options round messages, and a message can't be rounded.
            ScheduleError, PlanError: The user's schedule does not fit, or one microbatch does not fit.
        """
        return self.planned(self.lowered(compiled))

    def within(self, world: World) -> PipelineSpec:
        """Return the same for the workers of another world."""
        return replace(self, guests=world.guests, crowd=world.crowd)

    def under(self, synchrony: Synchrony) -> PipelineSpec:
        """Return the same for another mode of synchronisation."""
        return replace(self, options=replace(self.options, synchrony=synchrony))

    def planned(self, compiled: CompiledStages) -> PlannedPipeline:
        """Plan for stages that are lowered already; raises as :meth:`prepare`."""
        options = self.options
        initial, room = self._first_plan(compiled, self.memory)
        if initial.program.is_one_pipeline and self._shared_memory != self.memory:  # guests compute beside their hosts
            initial, room = self._first_plan(compiled, self._shared_memory)
        bandwidth = BandwidthOptions(options.uses_delegate, options.lossy_bf16 == "slow", compiled.cut_points)
        planner, draft = (partial(_better_plan, options.planning_seconds, share) for share in (PLANNER_SHARE, DRAFT_SHARE))
        remedies = partial(_remedies, bandwidth)
        peaks = partial(predicted_peaks, stages=compiled.train)
        is_alone = self.replicas == 1 or self._why_alone() is not None
        planning = Planning(
            planner,
            remedies,
            draft,
            activation_bytes=peaks,
            fills_free=room is not None,
            replicas=1 if is_alone else self.replicas,
            seconds=options.planning_seconds,
            changing=frozenset(changed_buffers(compiled)),
            at_home=frozenset(kept_at_home(compiled, self.placement)),
            guests=self.guests if not initial.program.is_one_pipeline else frozenset(),
        )
        factory = WorkerFactory(compiled, self.microbatches, planning, self.faults, self.failed, options, self.reduction)
        return PlannedPipeline(factory, initial, bandwidth, self._alone(compiled))

    def lowered(self, compiled: CompiledStages) -> CompiledStages:
        """Return the stages as the options have them run: compiled by another compiler, with rounded messages.

        Raises:
            OptionError: The options round messages, and a message can't be rounded.
        """
        compiled = compiled_by(self.options.inner, compiled)
        if not self.options.lossy_bf16:
            return compiled
        rounded = round_messages(compiled)  # also for "slow", to refuse early what can't be rounded
        return rounded if self.options.lossy_bf16 is True else compiled

    @property
    def _shared_memory(self) -> MemoryLimit | None:
        """The user's limit, shared by the workers of a process; None without one."""
        if self.memory is None or not self.guests:
            return self.memory
        return self.memory.of(limit / workers for limit, workers in zip(self.memory, self.crowd, strict=True))

    def _cost(self, compiled: CompiledStages, memory: MemoryLimit | None) -> tuple[CostModel, MemoryLimit | None]:
        """Return the estimated costs with these limits of memory, or the free memory of each rank if there are none."""
        cost = estimated_cost(compiled, self.placement)
        if self.options.emulate is not None:
            cost = self.options.emulate.apply(cost)
        if memory is not None and memory.unit is MemoryUnit.MICROBATCHES:
            return replace(cost, memory_limit=memory), None
        cost = in_bytes(cost, compiled.train)
        if memory is not None:
            return replace(cost, memory_limit=limits_within(memory, compiled.train, self.placement)), None
        if self.free is None:
            return cost, None
        return cost, limits_free(self.free, compiled.train, self.placement, self.is_to_come)

    def programs_of(self, first: CompiledStages, compiled: CompiledStages, microbatches: int) -> ShapePrograms:
        """Return what finds the programs of another shape of batch.

        Args:
            first: The stages for which the pipeline was compiled.
            compiled: The stages of the shape's larger microbatches.
            microbatches: The number of microbatches of the shape.

        Raises:
            PlanError: One microbatch does not fit the memory.
        """
        cost, room = self._cost(compiled, self._shared_memory)
        limited = cost if room is None else replace(cost, memory_limit=room)
        return ShapePrograms(self._cost(first, self._shared_memory)[0], limited, microbatches, is_given=self.memory is not None)

    def _first_plan(self, compiled: CompiledStages, memory: MemoryLimit | None) -> tuple[Plan, MemoryLimit | None]:
        """Return the first plan within these limits of memory, and the free memory of each rank if there are none."""
        options, (cost, room) = self.options, self._cost(compiled, memory)
        case = Case(cost, self.microbatches, self.placement, name="compiled")
        if not self.with_loss:
            return two_phase_plan(case, options.delegated), room
        if isinstance(options.schedule, Program) and not options.schedule.is_one_pipeline:
            return routed_plan(options.schedule, case, self.replicas, compiled, options), room
        plan = first_plan(options, case, room, options.delegated)
        may_leave = replace(self, options=replace(options, adapt=True))._why_alone() is None
        if not self.guests or options.schedule is not None or not may_leave:
            return plan, room
        return around_guests(plan, self.guests, self.replicas, compiled), room

    def _alone(self, compiled: CompiledStages) -> tuple[str, ...]:
        """Return the lines of :attr:`PlannedPipeline.alone`."""
        if self.replicas == 1 or (isinstance(self.options.schedule, Program) and not self.options.schedule.is_one_pipeline):
            return ()
        why = self._why_alone()
        if why is not None:
            return (f"no replica computes microbatches of another one's slow worker: {why}",)
        kept = kept_at_home(compiled, self.placement)
        return tuple(
            f"no replica computes another one's microbatches on stage {stage}, which {why}" for stage, why in kept.items()
        )

    def _why_alone(self) -> str | None:
        """Return why no replica may compute microbatches for another one; None if they may.

        Where a rank has several stages, messages between these are not sent at home. Rounded on a route, they would change
        numbers. Which edges round under ``lossy_bf16="slow"`` is planned for one pipeline.
        """
        options = self.options
        reasons = {
            "Options(share=False)": not options.share,
            "Options(adapt=False)": not options.adapt,
            "sites update by themselves under Options(synchrony=...)": options.apart is not None,
            "who computes what is decided within a step under Options(synchrony=...)": options.within_step is not None,
            "a function without a loss runs forwards and backwards as two programs": not self.with_loss,
            "a transport has one queue for all messages between two ranks, as NCCL has": self.in_order,
            "under Options(lossy_bf16='slow') each replica plans which messages round": options.lossy_bf16 == "slow",
            "under Options(lossy_bf16=True) stages of one rank send each other exact values, and routes would round them": (
                options.lossy_bf16 is True and has_several(self.placement)
            ),
        }
        return next((why for why, holds in reasons.items() if holds), None)


def _remedies(bandwidth: BandwidthOptions, case: Case, program: Program, spread: Edges, rounded: Edges) -> Remedies | None:
    """Find the remedies by the time that counts for the case: the makespan behind a barrier, otherwise the period."""
    timing = timing_of(barrier=case.barrier)
    return find_remedies(case, program, spread, rounded, bandwidth=bandwidth, timing=timing)


def _better_plan(seconds: float, share: float, case: Case, incumbent: Program) -> Program:
    """Search for a better plan within a share of a step.

    The time limit is safe, since only the coordinator searches and all ranks receive its result.
    """
    timing = timing_of(barrier=case.barrier)
    return timing.plan(case, incumbent=incumbent, budget=min(seconds, share * timing.of(incumbent, case.cost)))
