"""What a pipeline is made by, but for the model: from stages, however they are cut, to what its workers are started with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from adaptra.errors import OptionError
from adaptra.frontend.activation_memory import in_bytes, limits_free, limits_within, predicted_peaks
from adaptra.frontend.first_plan import first_plan, two_phase_plan
from adaptra.frontend.worker_factory import WorkerFactory
from adaptra.graph import CompiledStages
from adaptra.graph.estimated_cost import estimated_cost
from adaptra.graph.inner_compiler import compiled_by
from adaptra.graph.round_messages import round_messages
from adaptra.planning.bandwidth_remedies import BandwidthOptions, find_remedies
from adaptra.planning.planner import plan
from adaptra.program import Program
from adaptra.program.placement import is_straight
from adaptra.runtime.control.plan import Plan
from adaptra.runtime.control.replanning import Planning
from adaptra.runtime.injection.faults import Fault
from adaptra.runtime.options import Options
from adaptra.runtime.worker.loss_reduction import Reduction
from adaptra.simulation.cost import Case, CostModel
from adaptra.simulation.simulate import lower_bound, simulate
from adaptra.sizes import parse_size

PLANNER_SHARE: Final = 0.5
"""The part of a step that a search takes at most: a plan that is there before the next step ends is run a step sooner."""

DRAFT_SHARE: Final = 0.1
"""The same for what is only suspected: all ranks must have got ready for the plan before the next step ends."""


@dataclass(frozen=True, slots=True)
class PlannedPipeline:
    """What every rank comes to for itself before its worker starts.

    Attributes:
        starter: What workers are started with.
        initial: The first plan.
        means: What there is against edges whose bandwidth binds.
    """

    starter: WorkerFactory
    initial: Plan
    means: BandwidthOptions

    @property
    def compiled(self) -> CompiledStages:
        """The stages."""
        return self.starter.compiled

    def facts(self) -> list[object]:
        """What must be the same on every rank, as JSON values."""
        stages = [[str(one.inputs), str(one.outputs), *one.parameters, *one.buffers] for one in self.compiled.train]
        return [str(self.initial.program), [list(edge) for edge in self.initial.delegated], stages]


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """How stages become a pipeline; it holds no model, so it can be kept.

    Attributes:
        placement, microbatches, memory, with_loss, faults, options, reduction: As of
            :class:`adaptra.frontend.arguments.arguments.CompileArguments`.
        free: Per rank, the bytes that its device has free: the limit of plans where ``memory`` is None.
    """

    placement: tuple[int, ...]
    microbatches: int
    memory: int | str | None
    with_loss: bool
    faults: Sequence[Fault]
    options: Options
    reduction: Reduction
    free: tuple[int, ...] | None = None

    def prepare(self, compiled: CompiledStages) -> PlannedPipeline:
        """Plan for these stages.

        Raises:
            OptionError: A message between them can't be rounded, and the options round; or ranks with several stages share a
                parameter.
            ScheduleError, PlanError: The schedule asked for does not fit, or one microbatch does not.
        """
        options = self.options
        compiled = compiled_by(options.inner, compiled)
        if options.lossy_bf16:
            rounded = round_messages(compiled)  # which also refuses what can't be rounded, before a plan wants to
            compiled = rounded if options.lossy_bf16 is True else compiled
        self._check_shared(compiled)
        cost = estimated_cost(compiled, self.placement)
        if options.emulate is not None:
            cost = options.emulate.apply(cost)
        room: tuple[float, ...] | None = None
        if isinstance(self.memory, int):
            cost = replace(cost, memory_limit=(float(self.memory),) * len(set(self.placement)))
        else:
            cost = in_bytes(cost, compiled.train)
        if isinstance(self.memory, str):
            limits = limits_within(parse_size(self.memory), compiled.train, self.placement)
            cost = replace(cost, memory_limit=limits)
        elif self.memory is None and self.free is not None:
            room = limits_free(self.free, compiled.train, self.placement)
        case = Case(cost, self.microbatches, self.placement, name="compiled")
        places = compiled.places if is_straight(self.placement) else None  # else they are not cut again
        means = BandwidthOptions(options.uses_delegate, options.lossy_bf16 == "slow", places)
        planner, draft = (partial(_better_plan, options.planning_seconds, share) for share in (PLANNER_SHARE, DRAFT_SHARE))
        remedies = partial(find_remedies, means=means)
        holds = partial(predicted_peaks, stages=compiled.train)
        planning = Planning(planner, _makespan, lambda costs: lower_bound(costs).value, remedies, draft, holds=holds)
        initial = first_plan(options, case, room) if self.with_loss else two_phase_plan(options, case)
        starter = WorkerFactory(compiled, self.microbatches, planning, self.faults, options, self.reduction)
        return PlannedPipeline(starter, initial, means)

    def _check_shared(self, compiled: CompiledStages) -> None:
        """Refuse gradients that would be in line with activations: where ranks have several stages both take one channel."""
        for one in () if is_straight(self.placement) else compiled.tied:
            ranks = sorted({self.placement[stage] for stage in one.stages})
            if len(ranks) > 1:
                raise OptionError(
                    f"{one.name}: ranks {', '.join(map(str, ranks))} share it, and each has several stages: expected "
                    "placement='straight', or split= with its uses on one rank"
                )


def _better_plan(seconds: float, share: float, case: Case, incumbent: Program) -> Program:
    """Only the coordinator asks and all ranks get what it found, so the search may end by time: a share of a step at most."""
    return plan(case, incumbent=incumbent, budget=min(seconds, share * _makespan(incumbent, case.cost)))


def _makespan(program: Program, cost: CostModel) -> float:
    return simulate(program, cost).makespan
