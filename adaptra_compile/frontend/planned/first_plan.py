"""Plan 0, made before anything is measured: the user's schedule, or one for estimated costs and expected delays.

Nothing has been seen yet that makes ranks meet between steps, so it is a plan of steps without a barrier: of a short period.
No search here has a time limit, since every rank finds the first plan on its own and must find the same one.
"""

from __future__ import annotations

from dataclasses import replace

from adaptra.errors import PlanError
from adaptra.planning.check_memory import check_memory
from adaptra.planning.least_memory import plan_least_memory
from adaptra.planning.published import uniform_slack
from adaptra.planning.robust import robust_plan
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.program import Program
from adaptra.program.placement import in_turn, is_straight, v_shaped
from adaptra.program.schedules import generate_for, two_phases
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.options.planning_options import PlanningOptions
from adaptra.simulation.case import Case
from adaptra.simulation.scenarios import delay_scenarios
from adaptra.simulation.simulate import lower_bound, simulate
from adaptra.sizes import MemoryLimit

Edges = tuple[tuple[int, int], ...]


def first_plan(options: PlanningOptions, case: Case, room: MemoryLimit | None = None, delegated: Edges = ()) -> Plan:
    """Return the first plan.

    If the user gave no memory limit, it is the plan of least memory, see :mod:`adaptra.planning.least_memory`.

    Args:
        options: Options of planning.
        case: The estimated costs, with the user's memory limits.
        room: The memory of each rank, if the user gave no limits. It becomes the limit of all plans, unless the first plan
            needs more; then the limit is the first plan's need.
        delegated: The directed edges that take the delegate from the start, in ascending order.

    Raises:
        CaseError: A delay is expected on an edge that does not exist.
        PlanError: The schedule is of another size, or no plan fits the memory.
    """
    limited = case if room is None else replace(case, cost=replace(case.cost, memory_limit=room))
    try:
        program, reason = _first_program(options, limited, is_given=room is None)
    except PlanError:
        if room is None:
            raise
        program, reason = _first_program(options, case, is_given=False)
    if room is not None:
        needed = simulate(program, case.cost).peak_memory
        case = replace(case, cost=replace(case.cost, memory_limit=room.of(map(max, room, needed))))
    return Plan(0, program, case, PERIOD.of(program, case.cost), PERIOD.bound(case), reason, delegated)


def _first_program(options: PlanningOptions, case: Case, *, is_given: bool) -> tuple[Program, str]:
    """Return the first program and the reason for its choice. ``is_given`` is whether the user set the memory limits."""
    if options.schedule is not None:
        program = _asked_for(options.schedule, case)
        return program, f"{program.name}, as asked for"
    if options.expected_delays:
        scenarios = delay_scenarios(case.cost, options.expected_delays)
        found = robust_plan(case, scenarios, incumbent=_known(case), timing=PERIOD)
        return found.program, "good on average over the delays to expect, for the estimated costs"
    reason = "adapted to the estimated costs"
    if not is_given or case.cost.memory_limit is None:
        return plan_least_memory(case, incumbent=_known(case), timing=PERIOD), f"{reason}, with the least memory"
    program = PERIOD.plan(case, incumbent=_known(case))
    if is_straight(case.placement):
        spread = uniform_slack(case)
        if PERIOD.of(spread, case.cost) <= PERIOD.of(program, case.cost):
            return spread, f"{reason}, spare memory spread as slack"
    return program, reason


def two_phase_plan(case: Case, delegated: Edges) -> Plan:
    """Return the only plan of a function without a loss.

    Raises:
        PlanError: All microbatches together don't fit the memory.
    """
    program = two_phases(case.cost.stages, case.microbatches)
    check_memory("a function without a loss, which keeps all microbatches from its call to their backward", program, case.cost)
    reason = "all forwards, then all backwards, as the function returns no loss"
    return Plan(0, program, case, simulate(program, case.cost).makespan, lower_bound(case).value, reason, delegated)


def _known(case: Case) -> Program | None:
    """Return the known schedule of a placement with several stages on each rank, which the search may not find; else None."""
    stages, ranks = len(case.placement), len(set(case.placement))
    known = {in_turn(ranks, stages // ranks): "interleaved", v_shaped(ranks): "zbv"}
    schedule = None if is_straight(case.placement) else known.get(case.placement)
    return None if schedule is None else generate_for(schedule, case.placement, case.microbatches)


def _asked_for(schedule: str | Program, case: Case) -> Program:
    program = generate_for(schedule, case.placement, case.microbatches) if isinstance(schedule, str) else schedule
    if program.placement != case.placement or program.microbatches != case.microbatches:
        raise PlanError(
            f"schedule {program.name}: placement {program.placement} and {program.microbatches} microbatches: expected "
            f"{case.placement} and {case.microbatches}"
        )
    check_memory(f"schedule {program.name}", program, case.cost)
    return program
