"""The command ``plan``: one plan, a comparison, a sweep, an exact solution, or a robust plan for uncertain delays."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from adaptra.cli.inputs import verifier_arguments
from adaptra.cli.output import as_json, check_outputs, draw, figures, headline, line_width, simulated, size_of
from adaptra.errors import PlanError
from adaptra.passes import InsertComm, InsertCrossing, PassPipeline
from adaptra.passes.adapt_order import ADAPTED
from adaptra.planning.explaining.comparison import compare
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.large_jobs import LargePlan, is_large, plan_large
from adaptra.planning.routes.period_bound import period_bound
from adaptra.planning.routes.steady_steps import PERIOD, timing_of
from adaptra.program import Program
from adaptra.program.torch_csv import to_csv
from adaptra.report import drawing
from adaptra.report.files import write_whole
from adaptra.report.text import percent
from adaptra.simulation.bound import Bound
from adaptra.simulation.case import Case
from adaptra.simulation.simulate import Simulation, lower_bound, simulate

if TYPE_CHECKING:
    from adaptra.planning.exact import Exact

_PROGRAM_SUFFIXES: Final = (".sched", ".csv")

_EQUAL: Final = 1e-9
"""Relative tolerance between a period and its bound, which are sums in another order."""


def run_plan(options: Namespace, case: Case) -> str:
    """Run the command ``plan`` and return its standard output.

    Raises:
        AdaptraError: Wrong input.
    """
    suffixes = _PROGRAM_SUFFIXES if case.is_one_pipeline else _PROGRAM_SUFFIXES[:1]
    check_outputs({options.output: suffixes, options.picture: drawing.SUFFIXES})
    if options.exact is not None and options.budget is not None:
        raise PlanError("--budget with --exact: expected one of them; --exact takes a time itself")
    if options.sweep is not None and options.output is not None:
        raise PlanError("--sweep with -o: expected one of them; a sweep has a plan for every delay")
    if options.sweep is not None:
        return _sweep(options, case)
    if options.uncertain is not None:
        return _robust(options, case)
    if not case.is_one_pipeline and is_large(case) and (large := plan_large(case, budget=options.budget)) is not None:
        return _large_plan(options, large)
    exact = None if options.exact is None else _exact(options, case)
    planned = planned_for(case, options.in_flight, options.budget) if exact is None else _shortest(options, case, exact)
    program = _write_program(options, case, planned)
    if options.compare is not None:
        return _compare(options, case, planned)
    simulation = simulated(planned, case)
    draw(options, case, [simulation])
    judged, lines = _of_pipeline(case, simulation, exact) if case.is_one_pipeline else _of_job(options, case, simulation)
    if options.json:
        return as_json({"program": str(program)} | judged)
    return str(program) if options.output is None else lines


def _of_pipeline(case: Case, simulation: Simulation, exact: Exact | None) -> tuple[dict[str, Any], str]:
    """Return the figures of a plan of one pipeline as JSON values and as text."""
    bound, least = lower_bound(case), PERIOD.bound(case)
    values, lines = figures(case, simulation, bound, least), headline(case, simulation, bound, least)
    if exact is None:
        return values, lines
    # Behind a barrier the solver's bound, one of makespans, is that of the time that counts.
    is_proven = exact.proven if case.barrier else simulation.period <= least * (1 + _EQUAL)
    proof = _proof(case, exact, least, is_proven=is_proven)
    return values | {"exact_bound": exact.bound, "proven": is_proven}, lines + proof


def _of_job(options: Namespace, case: Case, simulation: Simulation) -> tuple[dict[str, Any], str]:
    """Return the same of a plan of several replicas."""
    healthy = simulation.period
    if not case.is_healthy:
        whole = case.healthy
        healthy = simulate(planned_for(whole, budget=options.budget), whole).period
    bound = period_bound(case, simulation.program.routing)
    found = _bounds(case, bound, healthy) | figures(case, simulation)
    return found, headline(case, simulation) + _comparison(case, simulation.period, healthy, bound)


def _bounds(case: Case, bound: Bound, healthy: float) -> dict[str, Any]:
    return {**bound.to_json(), "healthy_period": healthy, "fault_scaled_period": case.fault_scaled(healthy)}


def _large_plan(options: Namespace, plan: LargePlan) -> str:
    """Return the figures of a plan whose text is written to a file only."""
    case = plan.case
    for name in ("lower", "picture", "compare"):
        if getattr(options, name):
            raise too_large(f"--{name}", case)
    whole = plan if case.is_healthy else plan_large(replace(case, lost=frozenset()), budget=options.budget)
    assert whole is not None, "what is planned with lost workers is planned without"
    if options.output is not None:
        write_whole(options.output, str(plan))
    if options.json:
        found = {"case": case.name, "period": plan.period, **_bounds(case, plan.bound, whole.period), "held": plan.held}
        return as_json(found)
    written = "" if options.output is not None else "program  not printed, as it is large; -o FILE writes it\n"
    return (
        f"{size_of(case)}\n"
        f"period   at most {plan.period:.10g}\n"
        f"memory   at most {plan.held} microbatches\n" + _comparison(case, plan.period, whole.period, plan.bound) + written
    )


def too_large(what: str, case: Case) -> PlanError:
    """Return the error of what a large job does not have."""
    return PlanError(f"{what}: {case.name} has {case.workers} workers: expected a job of fewer than a million ops")


def _comparison(case: Case, period: float, healthy: float, bound: Bound) -> str:
    """Return lines that compare a plan's period with its bound, the healthy period and the fault-scaled limit."""
    lines = [f"bound    {bound}: this plan takes {_longer(period, bound.value)}"]
    if not case.is_healthy:
        lines.append(f"healthy  {healthy:.10g}: this plan takes {_longer(period, healthy)}")
        limit = case.fault_scaled(healthy)
        lines.append(
            f"scaled   {limit:.10g}: the healthy period, if what is left shared all work evenly; a plan may be shorter"
        )
    return "".join(f"{line}\n" for line in lines)


def _longer(period: float, than: float) -> str:
    return f"{percent(period / than - 1)} longer" if than > 0 else "time where it took none" if period > 0 else "no time either"


def _write_program(options: Namespace, case: Case, planned: Program) -> Program:
    """Lower the plan and write it to a file, both if requested, and return it."""
    program = _lowered(planned, case) if options.lower else planned
    if options.output is not None:
        write_whole(options.output, _program_text(program, options.output))
    return program


def _robust(options: Namespace, case: Case) -> str:
    from adaptra.cli.inputs import read_uncertain
    from adaptra.planning.robust import Objective, robust_plan
    from adaptra.simulation.scenarios import delay_scenarios

    scenarios = delay_scenarios(case.cost, read_uncertain(options.uncertain))
    timing = timing_of(barrier=case.barrier)
    plan = robust_plan(
        case,
        scenarios,
        objective=Objective(options.objective),
        in_flight=options.in_flight,
        budget=options.budget,
        timing=timing,
    )
    program = _write_program(options, case, plan.program)
    simulation, bound, least = simulated(plan.program, case), lower_bound(case), PERIOD.bound(case)
    draw(options, case, [simulation])
    if options.json:
        scenario_figures = {
            "expected": plan.expected,
            "worst": plan.worst,
            f"{timing.name}s": plan.times,
            "bounds": plan.bounds,
        }
        return as_json({"program": str(program)} | figures(case, simulation, bound, least) | scenario_figures)
    if options.output is None:
        return str(program)
    return (
        headline(case, simulation, bound, least)
        + f"expected {timing.name} {plan.expected:.10g} over {len(scenarios)} scenarios of {plan.candidates} plans compared\n"
        + f"worst    {timing.name} {plan.worst:.10g}\n"
    )


def _exact(options: Namespace, case: Case) -> Exact:
    from adaptra.planning.exact import solve_exactly

    return solve_exactly(case, in_flight=options.in_flight, seconds=options.exact)


def _shortest(options: Namespace, case: Case, exact: Exact) -> Program:
    """Return the solver's program of the shortest makespan, or without a barrier the one found from it that repeats soonest."""
    return exact.program if case.barrier else PERIOD.plan(case, in_flight=options.in_flight, incumbent=exact.program)


def _proof(case: Case, exact: Exact, least_period: float, *, is_proven: bool) -> str:
    """Return a line about what is proven of the time that counts, and of the makespan."""
    proven = "proven: " if is_proven else ""
    if case.barrier:
        return f"exact    {proven}no order is shorter than {exact.bound:.10g}\n"
    least = f"{'the least is' if exact.proven else 'at least'} {exact.bound:.10g}"
    return f"exact    {proven}no order repeats sooner than {least_period:.10g}; of all makespans {least}\n"


def _compare(options: Namespace, case: Case, planned: Program) -> str:
    comparison = compare(case, [*options.compare, ADAPTED], planned, in_flight=options.in_flight, budget=options.budget)
    draw(options, case, comparison.runs)
    if options.json:
        makespan_bound = lower_bound(case) if case.is_one_pipeline else None
        runs = [figures(case, run, makespan_bound) for run in comparison.runs]
        return as_json({"case": case.name, "bound": (makespan_bound or comparison.bound).value, "runs": runs})
    from adaptra.cli import tables

    return tables.comparison(comparison, line_width(options))


def _sweep(options: Namespace, case: Case) -> str:
    from adaptra.cli.inputs import read_sweep
    from adaptra.planning.explaining.comparison import sweep_delay

    sweep = sweep_delay(case, **read_sweep(options.sweep), in_flight=options.in_flight, budget=options.budget)
    if options.picture is not None:
        from adaptra.report.sweep import draw_sweep

        draw_sweep(sweep, options.picture)
    if options.json:
        return as_json(sweep.to_json())
    from adaptra.cli import tables

    return tables.sweep(sweep, line_width(options))


def planned_for(case: Case, in_flight: int | None = None, budget: float | None = None) -> Program:
    """Return the planner's plan: for the period, or for the makespan behind the barrier of one pipeline."""
    if not case.is_one_pipeline:
        return plan_job(case, budget=budget)
    return timing_of(barrier=case.barrier).plan(case, in_flight=in_flight, budget=budget)


def _lowered(program: Program, case: Case) -> Program:
    pipeline = PassPipeline((InsertComm(fold=case.fold), InsertCrossing(fold=case.fold, buffers=tuple(sorted(case.changing)))))
    return pipeline.apply(program, case.cost, **verifier_arguments(case))


def _program_text(program: Program, path: str) -> str:
    return to_csv(program) if Path(path).suffix.lower() == ".csv" else str(program)
