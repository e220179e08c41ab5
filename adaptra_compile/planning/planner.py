"""From a planning problem to a plan: the one call that the command line, the API and the controller share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adaptra.errors import PlanError
from adaptra.passes.adapt_order import search
from adaptra.passes.base import PassPipeline
from adaptra.passes.split_backward import SplitBackward
from adaptra.program import Program
from adaptra.simulation.cost import Case


def plan(
    case: Case,
    *,
    memory: int | Sequence[int] | None = None,
    incumbent: Program | None = None,
    effort: int | None = None,
    budget: float | None = None,
    seed: int = 0,
    should_stop: Callable[[], bool] | None = None,
) -> Program:
    """The best compute-only program found for a case: ``split-backward,adapt-order``.

    Without a budget the same arguments give the same program on every machine, so ranks that plan for themselves agree. With
    one, the program is the best found in that time, on this machine, today. The interpreter lock is free during the search.

    Args:
        case: Costs, microbatches and placement.
        memory: The most microbatches in flight per stage, one number for all stages or one each; the case's own memory limits
            hold as well.
        incumbent: The program that runs now. If it is within the limits, the plan is not worse; it must be of the same
            placement and number of microbatches.
        effort: See :class:`adaptra.passes.adapt_order.AdaptOrder`. With a budget, whichever ends first.
        budget: Seconds to search. Converting the result to Python takes some microseconds per op more; a first valid plan is
            found however short the budget.
        seed: Of all random choices of the search.
        should_stop: Called every few milliseconds, from the calling thread; once it returns true, the search ends with the best
            plan found so far. What it raises ends the search and reaches the caller.

    Raises:
        PlanError: No program fits the limits (says the smallest that would do), the incumbent is of another pipeline, or the
            budget is not a positive number of seconds.
        PassError: The incumbent holds communication ops.
        ScheduleError: The incumbent is not valid.
    """
    if budget is not None and not budget > 0:
        raise PlanError(f"budget of {budget} seconds: expected a positive number")
    limits = memory if memory is None or isinstance(memory, int) else tuple(memory)
    if incumbent is not None:
        if incumbent.placement != case.placement or incumbent.microbatches != case.microbatches:
            raise PlanError(
                f"incumbent {incumbent.name}: placement {','.join(map(str, incumbent.placement))} and "
                f"{incumbent.microbatches} microbatches: expected those of {case.name}, "
                f"{','.join(map(str, case.placement))} and {case.microbatches}"
            )
        incumbent = PassPipeline((SplitBackward(),)).apply(incumbent, case.cost)
    return search(case, limits, incumbent=incumbent, effort=effort, seed=seed, budget=budget, should_stop=should_stop)
