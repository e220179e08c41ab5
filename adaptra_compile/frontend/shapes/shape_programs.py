"""The program of a shape of batch under each agreed plan.

The agreed plan is one of the shape for which the pipeline was compiled. Ops of another shape take other times, but mostly by
one factor. So the agreed program is taken as it is where it has the number of microbatches and fits the memory. Otherwise a
program is planned for the agreed costs, scaled by the ratio of the estimated ones. No search here has a time limit, so all
ranks find the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from adaptra.errors import PlanError
from adaptra.planning.check_memory import check_memory
from adaptra.planning.least_memory import plan_least_memory
from adaptra.planning.routes.steady_steps import timing_of
from adaptra.program import Program
from adaptra.runtime.control.plans.plan import Plan
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel


@dataclass(frozen=True, slots=True)
class ShapePrograms:
    """Finds the programs of one shape.

    Attributes:
        first: The estimated costs of the shape for which the pipeline was compiled.
        cost: The estimated costs of this shape, with its memory and limits.
        microbatches: The number of microbatches.
        is_given: Whether the user gave the memory limits. Others are exceeded if nothing else fits.
    """

    first: CostModel
    cost: CostModel
    microbatches: int
    is_given: bool

    def __call__(self, plan: Plan) -> Program:
        """Return the program under an agreed plan.

        Raises:
            PlanError: No program fits the memory that the user gave.
        """
        agreed = plan.program
        if agreed.is_one_pipeline and agreed.microbatches == self.microbatches and self._fits(agreed):
            return agreed
        case = Case(self._scaled(plan.case.cost), self.microbatches, plan.case.placement, "another shape", plan.case.barrier)
        timing = timing_of(barrier=case.barrier)
        try:
            return timing.plan(case)
        except PlanError:
            if self.is_given:
                raise
            return plan_least_memory(replace(case, cost=replace(case.cost, memory_limit=None)), timing=timing)

    @property
    def relative(self) -> tuple[float, ...]:
        """The estimated time of each stage's ops, relative to the shape for which the pipeline was compiled."""
        own, first = (
            [sum(ops) for ops in zip(cost.forward, cost.input_grad, cost.weight_grad, strict=True)]
            for cost in (self.cost, self.first)
        )
        return tuple(one / other if one > 0 and other > 0 else 1.0 for one, other in zip(own, first, strict=True))

    def _fits(self, program: Program) -> bool:
        try:
            check_memory("the agreed program", program, self.cost)
        except PlanError:
            return False
        return True

    def _scaled(self, agreed: CostModel) -> CostModel:
        """Return this shape's costs: agreed ones by the ratio of the estimated ones, and this shape's memory."""

        def scaled(of: Callable[[CostModel], Sequence[float]]) -> tuple[float, ...]:
            ratios = zip(of(agreed), of(self.cost), of(self.first), strict=True)
            return tuple(known * own / first if first > 0 else known for known, own, first in ratios)

        return replace(
            self.cost,
            forward=scaled(lambda cost: cost.forward),
            input_grad=scaled(lambda cost: cost.input_grad),
            weight_grad=scaled(lambda cost: cost.weight_grad),
            latency_forward=agreed.latency_forward,
            latency_backward=agreed.latency_backward,
            occupancy_forward=agreed.occupancy_forward,
            occupancy_backward=agreed.occupancy_backward,
        )
