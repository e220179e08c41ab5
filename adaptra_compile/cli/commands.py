"""What each command does, once its arguments are read."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from adaptra.cli.doctor import examine, report
from adaptra.cli.inputs import read_program
from adaptra.cost import Case, CostModel
from adaptra.errors import PlanError, ScheduleError
from adaptra.program import Program
from adaptra.report import perfetto, picture, text
from adaptra.report.files import check_suffix, write_whole
from adaptra.schedules import PLACED, generate, generate_for
from adaptra.simulate import Bound, Simulation, lower_bound, simulate
from adaptra.torch_csv import to_csv

if TYPE_CHECKING:
    from adaptra.exact import Exact

_PROGRAM_SUFFIXES: Final = (".sched", ".csv")
_SLOW_FACTOR: Final = 2.0
_WIDTH_WITHOUT_TERMINAL: Final = 120


def run(options: Namespace) -> str:
    """Run the command that ``options.command`` names, and return what it says on standard output.

    Raises:
        AdaptraError: Wrong input.
    """
    match options.command:
        case "plan":
            return _plan(options)
        case "simulate":
            return _simulate(options)
        case "explain":
            return _explain(options)
        case "trace":
            return _trace(options)
        case "schedule":
            return str(_generate(options.name, options.stages, options.microbatches))
        case "doctor":
            found = examine()
            return _as_json(found) if options.json else report(found)
        case command:
            raise AssertionError(f"the parser knows a command {command!r} that nothing runs")


def _plan(options: Namespace) -> str:
    _check_outputs({options.output: _PROGRAM_SUFFIXES, options.picture: picture.SUFFIXES})
    if options.exact is not None and options.budget is not None:
        raise PlanError("--budget with --exact: expected one of them; --exact takes a time itself")
    case = Case.load(options.case)
    if options.sweep is not None:
        return _sweep(options, case)
    if options.uncertain is not None:
        return _robust(options, case)
    exact = None if options.exact is None else _exact(options, case)
    planned = _planned(case, options.memory, options.budget) if exact is None else exact.program
    simulation, bound = simulate(planned, case.cost), lower_bound(case)
    program = _write_program(options, case, planned)
    if options.compare is not None:
        return _compare(options, case, planned)
    _draw(options, case, simulation)
    if options.json:
        proof = {} if exact is None else {"exact_bound": exact.bound, "proven": exact.proven}
        return _as_json({"program": str(program)} | _figures(case, simulation, bound) | proof)
    if options.output is None:
        return str(program)
    proven = (
        "" if exact is None else f"exact    {'proven: ' if exact.proven else ''}no order is shorter than {exact.bound:.10g}\n"
    )
    return _headline(case, simulation, bound) + proven


def _write_program(options: Namespace, case: Case, planned: Program) -> Program:
    """Lower the plan if asked to, write it where asked to, and return it."""
    program = _lowered(planned, case.cost) if options.lower else planned
    if options.output is not None:
        write_whole(options.output, _program_text(program, options.output))
    return program


def _robust(options: Namespace, case: Case) -> str:
    from adaptra.cli.inputs import read_uncertain
    from adaptra.robust import Objective, delay_scenarios, robust_plan

    scenarios = delay_scenarios(case.cost, read_uncertain(options.uncertain))
    found = robust_plan(case, scenarios, objective=Objective(options.objective), memory=options.memory, budget=options.budget)
    program = _write_program(options, case, found.program)
    simulation, bound = simulate(found.program, case.cost), lower_bound(case)
    _draw(options, case, simulation)
    if options.json:
        figures = {"expected": found.expected, "worst": found.worst, "makespans": found.makespans, "bounds": found.bounds}
        return _as_json({"program": str(program)} | _figures(case, simulation, bound) | figures)
    if options.output is None:
        return str(program)
    return (
        _headline(case, simulation, bound)
        + f"expected {found.expected:.10g} over {len(scenarios)} scenarios of {found.candidates} plans compared\n"
        + f"worst    {found.worst:.10g}\n"
    )


def _exact(options: Namespace, case: Case) -> Exact:
    from adaptra.exact import solve_exactly

    return solve_exactly(case, memory=options.memory, seconds=options.exact)


def _compare(options: Namespace, case: Case, planned: Program) -> str:
    from adaptra.cli import tables
    from adaptra.comparison import compare
    from adaptra.passes.adapt_order import ADAPTED

    found = compare(case, [*options.compare, ADAPTED], memory=options.memory, adapted=planned)
    if options.picture is not None:
        timelines = [(_title(case, run.program), run.timeline) for run in found.runs]
        picture.draw(timelines, options.picture, slow_edges=options.slow_edge or _slow_edges(case.cost))
    if options.json:
        return _as_json(
            {"case": case.name, "bound": found.bound.value, "runs": [_figures(case, run, found.bound) for run in found.runs]}
        )
    return tables.comparison(found, _width(options))


def _sweep(options: Namespace, case: Case) -> str:
    from adaptra.cli import tables
    from adaptra.cli.inputs import read_sweep
    from adaptra.comparison import sweep_delay

    found = sweep_delay(case, **read_sweep(options.sweep), memory=options.memory, budget=options.budget)
    if options.picture is not None:
        from adaptra.report.sweep import draw_sweep

        draw_sweep(found, options.picture)
    return _as_json(found.to_json()) if options.json else tables.sweep(found, _width(options))


def _simulate(options: Namespace) -> str:
    _check_outputs({options.picture: picture.SUFFIXES, options.trace: (".json",)})
    case = Case.load(options.case)
    program = read_program(options.program, case)
    simulation = simulate(program, case.cost)
    bound = None if program.is_forward_only else lower_bound(case)
    _draw(options, case, simulation)
    if options.trace is not None:
        perfetto.write([(_title(case, program), simulation.timeline)], options.trace)
    if options.json:
        return _as_json(_figures(case, simulation, bound))
    grid = text.render(simulation.timeline, _width(options))
    return "\n".join([_headline(case, simulation, bound), _table(simulation), grid])


def _explain(options: Namespace) -> str:
    from adaptra.explanation import explain

    case = Case.load(options.case)
    program = _planned(case) if options.program is None else read_program(options.program, case)
    explanation = explain(program, case.cost, case.microbatches)
    if not options.sensitivity:
        return _as_json(explanation.to_json()) if options.json else str(explanation).rstrip("\n") + "\n"
    from adaptra.sensitivity import sensitivity

    edges = sensitivity(program, case.cost)
    if options.json:
        return _as_json(explanation.to_json() | {"sensitivity": [edge.to_json() for edge in edges]})
    from adaptra.cli import tables

    return str(explanation).rstrip("\n") + "\n\n" + tables.sensitivity(edges, _width(options))


def _trace(options: Namespace) -> str:
    _check_outputs({options.output: picture.SUFFIXES})
    runs = [run for file in options.files for run in perfetto.load_all(file)]
    if options.output is not None:
        picture.draw(runs, options.output, slow_edges=options.slow_edge or (), title=options.title)
        return ""
    return "\n".join(f"{title}\n{text.render(timeline, _width(options))}" for title, timeline in runs)


def _generate(name: str, stages: int, microbatches: int) -> Program:
    """A schedule by name; those with several stages on a rank with two."""
    if name not in PLACED:
        return generate(name, stages, microbatches)
    from adaptra import placements

    if stages % 2:
        raise ScheduleError(f"{name}: {stages} stages: expected an even number, two on each rank")
    return generate_for(
        name, placements.v_shaped(stages // 2) if name == "zbv" else placements.in_turn(stages // 2, 2), microbatches
    )


def _planned(case: Case, memory: int | None = None, budget: float | None = None) -> Program:
    from adaptra.planner import plan

    return plan(case, memory=memory, budget=budget)


def _lowered(program: Program, cost: CostModel) -> Program:
    from adaptra.passes import parse_pipeline

    return parse_pipeline("insert-comm").apply(program, cost)


def _program_text(program: Program, path: str) -> str:
    return to_csv(program) if Path(path).suffix.lower() == ".csv" else str(program)


def _check_outputs(outputs: Mapping[str | None, tuple[str, ...]]) -> None:
    """Refuse a name that can't be written before any work is done or any file is written."""
    for path, suffixes in outputs.items():
        if path is not None:
            check_suffix(path, suffixes)


def _draw(options: Namespace, case: Case, simulation: Simulation) -> None:
    if options.picture is not None:
        slow = options.slow_edge or _slow_edges(case.cost)
        picture.draw([(_title(case, simulation.program), simulation.timeline)], options.picture, slow_edges=slow)


def _slow_edges(cost: CostModel) -> list[tuple[int, int]]:
    times: dict[tuple[int, int], float] = {}
    for edge in range(cost.stages - 1):
        times[edge, edge + 1] = cost.latency_forward[edge] + cost.occupancy_forward[edge]
        times[edge + 1, edge] = cost.latency_backward[edge] + cost.occupancy_backward[edge]
    usual = median(times.values()) if times else 0.0
    return [edge for edge, time in times.items() if time > _SLOW_FACTOR * usual]


def _title(case: Case, program: Program) -> str:
    return f"{program.name} on {case.name}"


def _figures(case: Case, simulation: Simulation, bound: Bound | None) -> dict[str, Any]:
    """The JSON object of ``simulate``."""
    return {
        "name": simulation.program.name,
        "case": case.name,
        "bound": None if bound is None else bound.value,
        "bound_kind": None if bound is None else bound.kind.value,
        "bound_where": None if bound is None else bound.where,
        "gap": _gap(simulation, bound),
        **simulation.to_json(),
    }


def _gap(simulation: Simulation, bound: Bound | None) -> float | None:
    if bound is None or not (math.isfinite(bound.value) and bound.value > 0):
        return None
    return simulation.makespan / bound.value - 1


def _headline(case: Case, simulation: Simulation, bound: Bound | None) -> str:
    gap = _gap(simulation, bound)
    above = "" if gap is None else f", {text.percent(max(gap, 0.0))} above the bound"
    program = simulation.program
    return (
        f"{_title(case, program)}: {program.stages} stages, {program.ranks} ranks, {program.microbatches} microbatches\n"
        f"makespan {simulation.makespan:.10g}{above}\n"
        f"bound    {'none for programs without gradients' if bound is None else bound}\n"
        f"bubble   {text.percent(simulation.bubble_ratio)}\n"
    )


def _table(simulation: Simulation) -> str:
    placement, limits = simulation.program.placement, simulation.cost.memory_limit
    rows = [("rank", "stages", "busy", "bubble", "in flight", "memory", *(("limit",) if limits else ()))]
    for rank in range(simulation.program.ranks):
        stages = [stage for stage, holder in enumerate(placement) if holder == rank]
        exceeded = " exceeded" if rank in simulation.over_memory else ""
        rows.append(
            (
                str(rank),
                "+".join(map(str, stages)),
                f"{simulation.busy[rank]:g}",
                f"{simulation.bubble[rank]:g}",
                "+".join(str(simulation.peak_in_flight[stage]) for stage in stages),
                f"{simulation.peak_memory[rank]:g}",
                *((f"{limits[rank]:g}{exceeded}",) if limits else ()),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)


def _as_json(value: dict[str, Any]) -> str:
    """One line of JSON, which knows no infinity: such numbers are null."""
    return json.dumps(_finite(value), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _finite(part) for name, part in value.items()}
        case list() | tuple():
            return [_finite(part) for part in value]
        case _:
            return value


def _width(options: Namespace) -> int:
    width: int | None = getattr(options, "width", None)
    if width is not None:
        return width
    return max(text.LEAST_WIDTH, os.get_terminal_size(1).columns) if os.isatty(1) else _WIDTH_WITHOUT_TERMINAL
