"""The command ``plan``: one plan, a comparison, a sweep, an exact solution, or a robust plan for uncertain delays."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from adaptra.cli.output import as_json, check_outputs, draw_timeline, edges_to_mark, figures, headline, line_width, title_of
from adaptra.errors import PlanError
from adaptra.program import Program
from adaptra.program.torch_csv import to_csv
from adaptra.report import drawing, picture
from adaptra.report.files import write_whole
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import lower_bound, simulate

if TYPE_CHECKING:
    from adaptra.planning.exact import Exact

_PROGRAM_SUFFIXES: Final = (".sched", ".csv")

_EQUAL: Final = 1e-9
"""Relative tolerance between a period and its bound, which are sums in another order."""


def run_plan(options: Namespace, case: Case) -> str:
    """Run the command ``plan`` on one pipeline and return its standard output.

    Raises:
        AdaptraError: Wrong input.
    """
    check_outputs({options.output: _PROGRAM_SUFFIXES, options.picture: drawing.SUFFIXES})
    if options.exact is not None and options.budget is not None:
        raise PlanError("--budget with --exact: expected one of them; --exact takes a time itself")
    if options.sweep is not None and options.output is not None:
        raise PlanError("--sweep with -o: expected one of them; a sweep has a plan for every delay")
    if options.sweep is not None:
        return _sweep(options, case)
    if options.uncertain is not None:
        return _robust(options, case)
    exact = None if options.exact is None else _exact(options, case)
    planned = planned_for(case, options.in_flight, options.budget) if exact is None else _shortest(options, case, exact)
    program = _write_program(options, case, planned)
    if options.compare is not None:
        return _compare(options, case, planned)
    from adaptra.planning.routes.steady_steps import PERIOD

    simulation, bound, period_bound = simulate(planned, case.cost), lower_bound(case), PERIOD.bound(case)
    draw_timeline(options, case, simulation)
    if exact is None:
        is_proven = False
    elif case.barrier:  # the solver's bound is one of makespans
        is_proven = exact.proven
    else:
        is_proven = simulation.period <= period_bound * (1 + _EQUAL)
    if options.json:
        proof = {} if exact is None else {"exact_bound": exact.bound, "proven": is_proven}
        return as_json({"program": str(program)} | figures(case, simulation, bound, period_bound) | proof)
    if options.output is None:
        return str(program)
    proof_line = "" if exact is None else _proof(case, exact, period_bound, is_proven=is_proven)
    return headline(case, simulation, bound, period_bound) + proof_line


def _write_program(options: Namespace, case: Case, planned: Program) -> Program:
    """Lower the plan and write it to a file, both if requested, and return it."""
    program = _lowered(planned, case.cost) if options.lower else planned
    if options.output is not None:
        write_whole(options.output, _program_text(program, options.output))
    return program


def _robust(options: Namespace, case: Case) -> str:
    from adaptra.cli.inputs import read_uncertain
    from adaptra.planning.robust import Objective, robust_plan
    from adaptra.planning.routes.steady_steps import PERIOD, timing_of
    from adaptra.simulation.scenarios import delay_scenarios

    scenarios = delay_scenarios(case.cost, read_uncertain(options.uncertain))
    timing = timing_of(barrier=case.barrier)
    found = robust_plan(
        case,
        scenarios,
        objective=Objective(options.objective),
        in_flight=options.in_flight,
        budget=options.budget,
        timing=timing,
    )
    program = _write_program(options, case, found.program)
    simulation, bound, period_bound = simulate(found.program, case.cost), lower_bound(case), PERIOD.bound(case)
    draw_timeline(options, case, simulation)
    if options.json:
        scenario_figures = {
            "expected": found.expected,
            "worst": found.worst,
            f"{timing.name}s": found.times,
            "bounds": found.bounds,
        }
        return as_json({"program": str(program)} | figures(case, simulation, bound, period_bound) | scenario_figures)
    if options.output is None:
        return str(program)
    return (
        headline(case, simulation, bound, period_bound)
        + f"expected {timing.name} {found.expected:.10g} over {len(scenarios)} scenarios of {found.candidates} plans compared\n"
        + f"worst    {timing.name} {found.worst:.10g}\n"
    )


def _exact(options: Namespace, case: Case) -> Exact:
    from adaptra.planning.exact import solve_exactly

    return solve_exactly(case, in_flight=options.in_flight, seconds=options.exact)


def _shortest(options: Namespace, case: Case, exact: Exact) -> Program:
    """Return the solver's program of the shortest makespan, or without a barrier the one found from it that repeats soonest."""
    from adaptra.planning.routes.steady_steps import PERIOD

    return exact.program if case.barrier else PERIOD.plan(case, in_flight=options.in_flight, incumbent=exact.program)


def _proof(case: Case, exact: Exact, period_bound: float, *, is_proven: bool) -> str:
    """Return a line about what is proven of the time that counts, and of the makespan."""
    proven = "proven: " if is_proven else ""
    if case.barrier:
        return f"exact    {proven}no order is shorter than {exact.bound:.10g}\n"
    least = f"{'the least is' if exact.proven else 'at least'} {exact.bound:.10g}"
    return f"exact    {proven}no order repeats sooner than {period_bound:.10g}; of all makespans {least}\n"


def _compare(options: Namespace, case: Case, planned: Program) -> str:
    from adaptra.cli import tables
    from adaptra.passes.adapt_order import ADAPTED
    from adaptra.planning.explaining.comparison import compare

    found = compare(case, [*options.compare, ADAPTED], planned, in_flight=options.in_flight)
    if options.picture is not None:
        timelines = [(title_of(case, run.program), run.timeline) for run in found.runs]
        picture.draw(timelines, options.picture, slow_edges=options.slow_edge or edges_to_mark(case.cost))
    if options.json:
        bound = lower_bound(case)
        return as_json({"case": case.name, "bound": bound.value, "runs": [figures(case, run, bound) for run in found.runs]})
    return tables.comparison(found, line_width(options))


def _sweep(options: Namespace, case: Case) -> str:
    from adaptra.cli import tables
    from adaptra.cli.inputs import read_sweep
    from adaptra.planning.explaining.comparison import sweep_delay

    found = sweep_delay(case, **read_sweep(options.sweep), in_flight=options.in_flight, budget=options.budget)
    if options.picture is not None:
        from adaptra.report.sweep import draw_sweep

        draw_sweep(found, options.picture)
    return as_json(found.to_json()) if options.json else tables.sweep(found, line_width(options))


def planned_for(case: Case, in_flight: int | None = None, budget: float | None = None) -> Program:
    """Return the planner's plan: for the period, or for the makespan behind the case's barrier. Loads the planner."""
    from adaptra.planning.routes.steady_steps import timing_of

    return timing_of(barrier=case.barrier).plan(case, in_flight=in_flight, budget=budget)


def _lowered(program: Program, cost: CostModel) -> Program:
    from adaptra.passes import parse_pipeline

    return parse_pipeline("insert-comm").apply(program, cost)


def _program_text(program: Program, path: str) -> str:
    return to_csv(program) if Path(path).suffix.lower() == ".csv" else str(program)
