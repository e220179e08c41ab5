"""The commands, run with parsed arguments."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from adaptra.cli.doctor import examine, report
from adaptra.cli.inputs import read_case, read_program
from adaptra.cli.output import as_json, check_outputs, draw, figures, headline, line_width, simulated, title_of
from adaptra.errors import ReportError, ScheduleError
from adaptra.program import Program
from adaptra.program.placement import in_turn, v_shaped
from adaptra.program.program import refuse_size
from adaptra.program.schedules import PLACED, generate_for
from adaptra.report import drawing, perfetto, picture, run_page, text
from adaptra.report.job_rows import render_job
from adaptra.report.panels import STEPS_SHOWN
from adaptra.report.run_records import load_run, summary
from adaptra.simulation.case import Case
from adaptra.simulation.simulate import Simulation, lower_bound
from adaptra.simulation.timeline import Timeline


def run(options: Namespace) -> str:
    """Run the command named by ``options.command``, and return its standard output.

    Raises:
        AdaptraError: Wrong input.
    """
    match options.command:
        case "plan":
            from adaptra.cli.planning import run_plan

            return run_plan(options, read_case(options))
        case "simulate" | "explain" as command:
            return (_simulate if command == "simulate" else _explain)(options, read_case(options))
        case "trace" | "resilience" as command:
            return _trace(options) if command == "trace" else _resilience(options)
        case "opt" | "schedule" as command:
            return _opt(options) if command == "opt" else _schedule(options)
        case "reduce" | "modes" as command:
            return _reduce(options) if command == "reduce" else _modes(options)
        case "doctor":
            found = examine()
            return as_json(found) if options.json else report(found)
        case unknown:
            raise AssertionError(f"the parser knows a command {unknown!r} that nothing runs")


def _opt(options: Namespace) -> str:
    from adaptra.cli.opt import run_opt

    return run_opt(options)


def _reduce(options: Namespace) -> str:
    from adaptra.cli.reduce import run_reduce

    return run_reduce(options)


def _modes(options: Namespace) -> str:
    from adaptra.cli.modes import run_modes

    return run_modes(options)


def _schedule(options: Namespace) -> str:
    program = _generate(options.name, options.stages, options.microbatches)
    return as_json({"name": program.name, "program": str(program)}) if options.json else str(program)


def _simulate(options: Namespace, case: Case) -> str:
    check_outputs({options.picture: drawing.SUFFIXES, options.trace: (".json",)})
    program = read_program(options.program, case)
    simulation = simulated(program, case)
    bound = lower_bound(case) if case.is_one_pipeline and not program.is_forward_only else None
    draw(options, case, [simulation])
    if options.trace is not None:
        steps = () if case.is_one_pipeline else simulation.steps[:STEPS_SHOWN]
        perfetto.write([(title_of(case, program), simulation.timeline)], options.trace, steps=steps)
    if options.json:
        return as_json(figures(case, simulation, bound))
    width, head = line_width(options), headline(case, simulation, bound)
    if not case.is_one_pipeline:
        return f"{head}\n{render_job(simulation, width)}"
    return "\n".join([head, _table(simulation), text.render(simulation.timeline, width)])


def _explain(options: Namespace, case: Case) -> str:
    from adaptra.cli.planning import planned_for, too_large
    from adaptra.planning.explaining.explanation import explain
    from adaptra.planning.routes.large_jobs import is_large

    if is_large(case):
        raise too_large("explain", case)
    program = planned_for(case) if options.program is None else read_program(options.program, case)
    explanation = explain(program, case)
    if not options.sensitivity:
        return as_json(explanation.to_json()) if options.json else explanation.text(equations=options.equations)
    from adaptra.cli import tables
    from adaptra.simulation.sensitivity import sensitivity

    edges = sensitivity(program, case.cost)
    if options.json:
        return as_json(explanation.to_json() | {"sensitivity": [edge.to_json() for edge in edges]})
    return explanation.text(equations=options.equations) + "\n" + tables.sensitivity(edges, line_width(options))


def _resilience(options: Namespace) -> str:
    from adaptra.cli.resilience import run_resilience

    return run_resilience(options)


def _trace(options: Namespace) -> str:
    check_outputs({options.output: drawing.SUFFIXES})
    if any(Path(file).is_dir() for file in options.files):
        return _trace_run(options)
    for file in options.files:
        if Path(file).suffix == ".jsonl":
            raise ReportError(f"{file}: the records of one rank: give the folder of the run, or traces (.json)")
    if options.json:
        raise ReportError("trace --json: expected the folder of a run; traces (.json) are JSON themselves")
    runs = [run for file in options.files for run in perfetto.load_all(file)]
    if options.output is not None:
        if options.slow_edge and not any(timeline.program.is_one_pipeline for _, timeline in runs):
            raise ReportError("trace --slow-edge: expected traces of one pipeline; those of several replicas mark no edges")
        picture.draw(runs, options.output, slow_edges=options.slow_edge or (), title=options.title)
        return ""
    return "\n".join(f"{title}\n{_as_text(timeline, line_width(options))}" for title, timeline in runs)


def _as_text(timeline: Timeline, width: int) -> str:
    lanes = text.render(timeline, width)
    if timeline.program.is_one_pipeline or timeline.seconds_per_unit is None:  # the table is in milliseconds
        return lanes
    from adaptra.report.stage_table import worker_table

    return f"{lanes}{worker_table(timeline)}"


def _trace_run(options: Namespace) -> str:
    if len(options.files) > 1 or options.slow_edge:
        raise ReportError(f"trace {' '.join(options.files)}: expected traces only, or one folder of a run and no --slow-edge")
    run = load_run(options.files[0])
    if options.output is not None:
        run_page.draw_run(run, options.output, title=options.title)
    if options.json:
        return as_json(run.to_json())
    return summary(run) if options.output is None else ""


def _generate(name: str, stages: int, microbatches: int) -> Program:
    """Return a schedule by name. Interleaved ones have two stages per rank."""
    if (why := refuse_size(stages, microbatches)) is not None:
        raise ScheduleError(f"{name}: {why}")
    if name not in PLACED:
        return generate_for(name, tuple(range(stages)), microbatches)
    if stages % 2:
        raise ScheduleError(f"{name}: {stages} stages: expected an even number, two on each rank")
    return generate_for(name, v_shaped(stages // 2) if name == "zbv" else in_turn(stages // 2, 2), microbatches)


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
