"""From a planning problem to a plan: the one call that the command line, the API and the controller share."""

from __future__ import annotations

from collections.abc import Sequence

from adaptra.cost import Case
from adaptra.errors import PlanError
from adaptra.passes.adapt_order import AdaptOrder
from adaptra.passes.base import Pipeline
from adaptra.passes.split_backward import SplitBackward
from adaptra.program import Kind, Op, Program


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
    if incumbent is None:
        incumbent = _phases(case)
    if incumbent.placement != case.placement or incumbent.microbatches != case.microbatches:
        raise PlanError(
            f"incumbent {incumbent.name}: placement {','.join(map(str, incumbent.placement))} and {incumbent.microbatches} "
            f"microbatches: expected those of {case.name}, {','.join(map(str, case.placement))} and {case.microbatches}"
        )
    limits = memory if memory is None or isinstance(memory, int) else tuple(memory)
    return Pipeline((SplitBackward(), AdaptOrder(limits, effort))).apply(incumbent, case.cost)


def _phases(case: Case) -> Program:
    """Stage after stage all forwards, then back all gradients: valid for every placement."""
    orders: list[list[Op]] = [[] for _ in range(max(case.placement) + 1)]
    for stage, rank in enumerate(case.placement):
        orders[rank] += [Op(stage, Kind.F, microbatch) for microbatch in range(case.microbatches)]
    for stage in reversed(range(case.cost.stages)):
        for microbatch in range(case.microbatches):
            orders[case.placement[stage]] += [Op(stage, Kind.I, microbatch), Op(stage, Kind.W, microbatch)]
    return Program("gpipe", case.placement, case.microbatches, tuple(map(tuple, orders)))
