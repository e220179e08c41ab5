"""The commands ``plan``, ``simulate`` and ``explain`` for several replicas, with lost and slow workers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from adaptra.cli.inputs import read_file
from adaptra.cli.output import as_json, check_outputs, line_width, title_of
from adaptra.errors import CaseError, PlanError, ScheduleError
from adaptra.program import Program
from adaptra.program.schedules import GENERATORS, PLACED
from adaptra.report import picture
from adaptra.report.drawing import SUFFIXES
from adaptra.report.files import write_whole
from adaptra.report.job_rows import render_job
from adaptra.report.text import percent
from adaptra.simulation.case import Case
from adaptra.simulation.simulate import Simulation, simulate

if TYPE_CHECKING:
    from adaptra.planning.routes.large_jobs import LargePlan
    from adaptra.planning.routes.period_bound import PeriodBound

_OF_ONE_PIPELINE: Final = ("sweep", "exact", "uncertain", "in_flight", "slow_edge")
"""The options of ``plan`` that several replicas don't have."""


def run_job_plan(options: Namespace, case: Case) -> str:
    """Run the command ``plan`` on several replicas and return its standard output."""
    from adaptra.planning.routes.job_planner import plan_job
    from adaptra.planning.routes.large_jobs import is_large, plan_large
    from adaptra.planning.routes.period_bound import period_bound

    check_outputs({options.output: (".sched",), options.picture: SUFFIXES})
    for name in _OF_ONE_PIPELINE:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise PlanError(f"{option}: {case.name} has several replicas: expected a case of one pipeline")
    if is_large(case) and (large := plan_large(case, budget=options.budget)) is not None:
        return _large_plan(options, large)
    program = plan_job(case, budget=options.budget)
    if options.lower:
        program = _lowered(program, case)
    if options.output is not None:
        write_whole(options.output, str(program))
    if options.compare is not None:
        return _compared(options, case, program)
    simulated = simulate(program, case)
    bound = period_bound(case, program.routing)
    healthy = simulated.period
    if not case.is_healthy:
        whole = replace(case, lost=frozenset(), slow={})
        healthy = simulate(plan_job(whole, budget=options.budget), whole).period
    _draw(options, [(title_of(case, program), simulated)])
    figures = {
        "bound": bound.value,
        "bound_kind": bound.kind.value,
        "bound_where": bound.where,
        "healthy_period": healthy,
        "fault_scaled_period": case.fault_scaled(healthy),
    }
    if options.json:
        return as_json({"program": str(program)} | figures | job_figures(simulated))
    if options.output is None:
        return str(program)
    return job_headline(simulated) + _comparison(case, simulated.period, healthy, bound)


def _large_plan(options: Namespace, plan: LargePlan) -> str:
    """Return the figures of a plan whose text is written to a file only."""
    from adaptra.planning.routes.large_jobs import plan_large

    case = plan.case
    for name in ("lower", "picture", "compare"):
        if getattr(options, name):
            raise _too_large(f"--{name}", case)
    whole = plan if case.is_healthy else plan_large(replace(case, lost=frozenset()), budget=options.budget)
    assert whole is not None, "what is planned with lost workers is planned without"
    if options.output is not None:
        write_whole(options.output, str(plan))
    if options.json:
        return as_json(
            {
                "case": case.name,
                "period": plan.period,
                "bound": plan.bound.value,
                "bound_kind": plan.bound.kind.value,
                "bound_where": plan.bound.where,
                "healthy_period": whole.period,
                "fault_scaled_period": case.fault_scaled(whole.period),
                "held": plan.held,
            }
        )
    written = "" if options.output is not None else "program  not printed, as it is large; -o FILE writes it\n"
    return (
        f"{_size(case)}\n"
        f"period   at most {plan.period:.10g}\n"
        f"memory   at most {plan.held} microbatches\n" + _comparison(case, plan.period, whole.period, plan.bound) + written
    )


def _too_large(what: str, case: Case) -> PlanError:
    return PlanError(f"{what}: {case.name} has {case.workers} workers: expected a job of fewer than a million ops")


def _comparison(case: Case, period: float, healthy: float, bound: PeriodBound) -> str:
    """Return lines that compare a plan's period with its bound, the healthy period and the fault-scaled limit."""
    lines = [f"bound    {bound}: this plan takes {_longer(period, bound.value)}"]
    if not case.is_healthy:
        lines.append(f"healthy  {healthy:.10g}: this plan takes {_longer(period, healthy)}")
        limit = case.fault_scaled(healthy)
        lines.append(
            f"scaled   {limit:.10g}: the healthy period, if what is left shared all work evenly; a plan may be shorter"
        )
    return "".join(f"{line}\n" for line in lines)


def run_job_simulate(options: Namespace, case: Case) -> str:
    """Run the command ``simulate`` on several replicas and return its standard output."""
    check_outputs({options.picture: SUFFIXES, options.trace: (".json",)})
    if options.slow_edge:
        raise CaseError(f"--slow-edge: {case.name} has several replicas: expected a case of one pipeline")
    simulated = simulate(_read_program(options.program, case), case)
    _draw(options, [(title_of(case, simulated.program), simulated)])
    if options.trace is not None:
        from adaptra.report.panels import STEPS_SHOWN
        from adaptra.report.perfetto import write

        title = title_of(case, simulated.program)
        write([(title, simulated.timeline)], options.trace, steps=simulated.steps[:STEPS_SHOWN])
    if options.json:
        return as_json(job_figures(simulated))
    return job_headline(simulated) + "\n" + render_job(simulated, line_width(options))


def _compared(options: Namespace, case: Case, program: Program) -> str:
    from adaptra.cli import tables
    from adaptra.passes.adapt_order import ADAPTED
    from adaptra.planning.explaining.comparison import compare

    found = compare(case, [*options.compare, ADAPTED], program, budget=options.budget)
    _draw(options, [(run.program.name, run) for run in found.runs])
    if options.json:
        return as_json({"case": case.name, "bound": found.bound.value, "runs": [job_figures(run) for run in found.runs]})
    return tables.comparison(found, line_width(options))


def _draw(options: Namespace, simulations: Sequence[tuple[str, Simulation]]) -> None:
    if options.picture is not None:
        picture.draw(simulations, options.picture)


def run_job_explain(options: Namespace, case: Case) -> str:
    """Run the command ``explain`` on several replicas and return its standard output."""
    from adaptra.planning.explaining.job_explanation import explain_job
    from adaptra.planning.routes.job_planner import plan_job
    from adaptra.planning.routes.large_jobs import is_large

    if options.sensitivity:
        raise CaseError(f"--sensitivity: {case.name} has several replicas: expected a case of one pipeline")
    if is_large(case):
        raise _too_large("explain", case)
    explanation = explain_job(plan_job(case) if options.program is None else _read_program(options.program, case), case)
    return as_json(explanation.to_json()) if options.json else explanation.text(equations=options.equations)


def _read_program(given: str, case: Case) -> Program:
    if given in (*GENERATORS, *PLACED):
        raise ScheduleError(f"{given}: a schedule of one pipeline: expected the file of a program for {case.name}")
    return read_file(given)


def job_figures(simulated: Simulation) -> dict[str, Any]:
    """Return the JSON object of a simulated program of several replicas."""
    return {"name": simulated.program.name, "case": simulated.case.name, **simulated.to_json()}


def job_headline(simulated: Simulation) -> str:
    """Return lines for people: program and case, period, first step, memory."""
    case, program = simulated.case, simulated.program
    over = ", ".join(map(str, simulated.over_memory))
    return (
        f"{program.name} on {_size(case)}\n"
        f"period   {simulated.period:.10g}\n"
        f"makespan {simulated.makespan:.10g} of the first step\n"
        f"memory   at most {max(simulated.held)} microbatches{f': too many on worker {over}' if over else ''}\n"
    )


def _size(case: Case) -> str:
    return (
        f"{case.name}: {case.replicas} replicas of {case.stages} stages, {case.workers - len(case.lost)} of {case.workers} "
        f"workers, {case.microbatches} microbatches each"
    )


def _lowered(program: Program, case: Case) -> Program:
    from adaptra.passes import InsertComm, InsertCrossing, PassPipeline

    pipeline = PassPipeline((InsertComm(fold=case.fold), InsertCrossing(fold=case.fold, buffers=tuple(sorted(case.changing)))))
    return pipeline.apply(program, case.cost, hands_over=case.hands_over, barrier=case.barrier, changing=case.changing)


def _longer(period: float, than: float) -> str:
    return f"{percent(period / than - 1)} longer" if than > 0 else "time where it took none" if period > 0 else "no time either"
