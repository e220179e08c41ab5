"""The first plan that has routes: around guests, or of a program that the user gives, if this job can run it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from adaptra.errors import CaseError, OptionError, PlanError, ScheduleError
from adaptra.graph import CompiledStages
from adaptra.planning.check_memory import check_memory
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.period_bound import period_bound
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.program.verify import verify
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.options import Options
from adaptra.simulation.case import Case
from adaptra.simulation.job import alike_case
from adaptra.simulation.simulate import simulate

logger = logging.getLogger(__name__)

EFFORT: Final = 60_000
"""What the search of a plan around guests schedules, in ops: less than 50 ms for 32 workers, for which a job stands still."""


def routed_plan(program: Program, case: Case, replicas: int, compiled: CompiledStages, options: Options) -> Plan:
    """Return the plan of a given program of several replicas.

    Args:
        program: The program, compute ops with or without REDUCE and STEP.
        case: The costs of each replica, with the user's memory limits.
        replicas: The number of replicas of the job.
        compiled: The stages.
        options: The user's options.

    Raises:
        OptionError: Another option does not go with routes.
        PlanError: The program is of another job, or exceeds the memory. Or it routes microbatches that can't leave their home.
    """
    routing = program.routing
    what = f"schedule {program.name}"
    if options.adapt:
        raise OptionError(f"{what} with routes and adapt=True: expected adapt=False, as routes are followed and not changed")
    grid = case.of_replicas(replicas).grid
    if routing.workers != grid or program.microbatches != case.microbatches:
        rows = " ".join(",".join(map(str, row)) for row in grid)
        raise PlanError(
            f"{what}: {routing.replicas} replicas of {routing.stages} stages, {program.microbatches} microbatches, and workers "
            f"as its second line says: expected {replicas}, {case.cost.stages}, {case.microbatches}, and 'workers {rows}'"
        )
    if program.is_lowered:
        raise PlanError(f"{what}: it has SEND and RECV ops: expected compute ops, REDUCE and STEP only")
    check_memory(what, program, case.cost)
    _check_routed_stages(what, program, routing, compiled)
    found = simulate(program, alike_case(program, case.cost, changing=changed_buffers(compiled)))
    bound = period_bound(found.case, routing).value
    return Plan(0, program, case, found.period, bound, f"{program.name}, with its routes, as asked for", options.delegated)


def around_guests(plan: Plan, guests: Collection[int], replicas: int, compiled: CompiledStages) -> Plan:
    """Return a plan by which other workers compute the microbatches of guests; the plan itself where that can't be.

    Args:
        plan: The plan of one pipeline.
        guests: The workers whose processes are at home in other replicas.
        replicas: The number of replicas of the job.
        compiled: The stages.
    """
    kept = frozenset(kept_at_home(compiled, plan.case.placement))
    case = replace(plan.case.of_replicas(replicas), changing=frozenset(changed_buffers(compiled)), at_home=kept)
    try:
        case = replace(case, guests=frozenset(guests))
        program = plan_job(case, effort=EFFORT)
    except (CaseError, PlanError) as error:
        logger.info("guests compute their own microbatches: %s", error)
        return plan
    bound = period_bound(case, program.routing).value
    reason = f"{plan.reason}, around guests"
    return replace(plan, program=program, predicted=simulate(program, case).period, bound=bound, reason=reason)


def changed_buffers(compiled: CompiledStages) -> dict[int, str]:
    """Return the stages that change buffers, each with the name of one."""
    return {one.index: name for one in compiled.train for name in compiled.changing_in(one.index)[:1]}


def kept_at_home(compiled: CompiledStages, placement: Sequence[int]) -> dict[int, str]:
    """Return the stages whose microbatches only their own replica's worker may compute, each with the reason.

    Gradients of shared weights take channels for which ranks with several stages have other uses.
    """
    found = {stage: f"shares {one.name} with another stage" for one in compiled.tied for stage in one.stages}
    several = {stage for stage, rank in enumerate(placement) if placement.count(rank) > 1}
    return {stage: f"{found[stage]}, and its rank has several stages" for stage in sorted(several.intersection(found))}


def _check_routed_stages(what: str, program: Program, routing: Routing, compiled: CompiledStages) -> None:
    """Refuse routes that where its tied weights can't follow, or whose order its buffers don't allow."""
    changed, kept = changed_buffers(compiled), kept_at_home(compiled, routing.placement)
    handed_over: set[int] = set()
    for replica, row in enumerate(routing.workers):
        for stage, home in enumerate(row):
            away = [one for one in range(routing.microbatches) if routing.holder(replica, stage, one) != home]
            if not away:
                continue
            where = f"{what}: microbatch {away[0]} of replica {replica} leaves its home on stage {stage}"
            if stage in kept:
                raise PlanError(f"{where}, which {kept[stage]}: expected routes that keep it at home, or one stage per rank")
            if stage in changed:
                handed_over.add(stage)
    if handed_over:
        try:
            verify(program, changing=handed_over)
        except ScheduleError as error:
            names = ", ".join(changed[stage] for stage in sorted(handed_over))
            raise PlanError(
                f"{what}: forwards change {names} and run in microbatch order over all workers: expected orders that allow it, "
                f"but {error}"
            ) from error
