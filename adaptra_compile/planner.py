"""From a planning problem to a plan: the one call that the command line, the API and the controller share."""

from __future__ import annotations

from collections.abc import Sequence

from adaptra.cost import Case
from adaptra.errors import PlanError
from adaptra.passes.adapt_order import AdaptOrder, one_at_a_time
from adaptra.passes.base import Pipeline
from adaptra.passes.split_backward import SplitBackward
from adaptra.program import Program


def plan(
    case: Case,
    *,
    memory: int | Sequence[int] | None = None,
    incumbent: Program | None = None,
    effort: int | None = None,
) -> Program:
    """The best compute-only program found for a case: ``split-backward,adapt-order``.

    The same arguments give the same program on every machine, so ranks that plan for themselves agree.

    Args:
        case: Costs, microbatches and placement.
        memory: The most microbatches in flight per stage, one number for all stages or one each; the case's own memory limits
            hold as well.
        incumbent: The program that runs now. If it is within the limits, the plan is not worse; it must be of the same
            placement and number of microbatches.
        effort: See :class:`adaptra.passes.adapt_order.AdaptOrder`.

    Raises:
        PlanError: No program fits the limits (says the smallest that would do), or the incumbent is of another pipeline.
        PassError: The incumbent holds communication ops.
        ScheduleError: The incumbent is not valid.
    """
    limits = memory if memory is None or isinstance(memory, int) else tuple(memory)
    adapt = AdaptOrder(limits, effort)
    if incumbent is None:
        return Pipeline((adapt,)).apply(one_at_a_time(case.placement, case.microbatches), case.cost, trusted=True)
    if incumbent.placement != case.placement or incumbent.microbatches != case.microbatches:
        raise PlanError(
            f"incumbent {incumbent.name}: placement {','.join(map(str, incumbent.placement))} and {incumbent.microbatches} "
            f"microbatches: expected those of {case.name}, {','.join(map(str, case.placement))} and {case.microbatches}"
        )
    return Pipeline((SplitBackward(), adapt)).apply(incumbent, case.cost)
