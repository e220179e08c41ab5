"""The planner: one function for the command line, the API and the controller."""

from __future__ import annotations

from collections.abc import Sequence

from adaptra.errors import PlanError
from adaptra.passes.adapt_order import search
from adaptra.passes.base import PassPipeline
from adaptra.passes.split_backward import SplitBackward
from adaptra.program import Program
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel


def plan(
    case: Case,
    *,
    in_flight: int | Sequence[int] | None = None,
    incumbent: Program | None = None,
    effort: int | None = None,
    budget: float | None = None,
    seed: int = 0,
) -> Program:
    """Find the best compute-only program for a case, by the passes ``split-backward,adapt-order``.

    Without a budget the same arguments give the same program on every machine, so ranks that plan on their own agree. With a
    budget the program is the best found in that time, so it may differ between runs. The search releases the interpreter lock.

    Args:
        case: Costs, microbatches and placement.
        in_flight: The most microbatches in flight per stage, one number for all stages or one each. The case's own memory
            limits apply as well.
        incumbent: The program that runs now, of the same placement and number of microbatches. If it is within the limits, the
            plan is not longer.
        effort: See :class:`adaptra.passes.adapt_order.AdaptOrder`. With a budget too, the search ends at whichever is reached
            first.
        budget: Seconds to search. Conversion of the result to Python takes a few more microseconds per op. A first valid plan
            is found even with the shortest budget.
        seed: Seed of all random choices of the search.

    Raises:
        PlanError: No program fits the limits, the incumbent is of another pipeline, or the budget is not a positive number of
            seconds. If no program fits, the text names the smallest limit that works.
        CaseError: The case is not of one pipeline.
        PassError: The incumbent has communication ops.
        ScheduleError: The incumbent is not valid.
    """
    case.require_one_pipeline("plan")
    if budget is not None and not budget > 0:
        raise PlanError(f"budget of {budget} seconds: expected a positive number")
    limits = in_flight if in_flight is None or isinstance(in_flight, int) else tuple(in_flight)
    if incumbent is not None:
        if incumbent.placement != case.placement or incumbent.microbatches != case.microbatches:
            raise PlanError(
                f"incumbent {incumbent.name}: placement {','.join(map(str, incumbent.placement))} and "
                f"{incumbent.microbatches} microbatches: expected those of {case.name}, "
                f"{','.join(map(str, case.placement))} and {case.microbatches}"
            )
        incumbent = with_split_backwards(incumbent, case.cost)
    return search(case, limits, incumbent=incumbent, effort=effort, seed=seed, budget=budget)


def with_split_backwards(program: Program, cost: CostModel) -> Program:
    """Return a program with I and W in place of each B, as the search takes it.

    Raises:
        ScheduleError: The program is not valid.
    """
    return PassPipeline((SplitBackward(),)).apply(program, cost)
