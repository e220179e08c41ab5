"""Output shared by several commands: figures as text and as JSON, and the picture of a timeline."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from adaptra.program import Program
from adaptra.report import picture, text
from adaptra.report.files import check_suffix
from adaptra.simulation.bound import Bound
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import Simulation, simulate

_SLOW_FACTOR: Final = 2.0
_WIDTH_WITHOUT_TERMINAL: Final = 120
_NO_BOUND: Final[Mapping[str, Any]] = {"bound": None, "bound_kind": None, "bound_where": None}


def check_outputs(outputs: Mapping[str | None, tuple[str, ...]]) -> None:
    """Refuse a file name that can't be written, before any work is done or any file is written."""
    for path, suffixes in outputs.items():
        if path is not None:
            check_suffix(path, suffixes)


def simulated(program: Program, case: Case) -> Simulation:
    """Simulate a program. That of one pipeline has its updates in the costs of its last ops."""
    return simulate(program, case.cost if case.is_one_pipeline else case)


def draw(options: Namespace, case: Case, simulations: Sequence[Simulation]) -> None:
    """Draw the picture requested by ``--picture``, if any."""
    if options.picture is not None:
        is_compared = len(simulations) > 1 and not case.is_one_pipeline
        shown = [(one.program.name if is_compared else title_of(case, one.program), one) for one in simulations]
        picture.draw(shown, options.picture, slow_edges=options.slow_edge or edges_to_mark(case.cost))


def edges_to_mark(cost: CostModel) -> list[tuple[int, int]]:
    """Return the directed edges that are far slower than most."""
    times: dict[tuple[int, int], float] = {}
    for edge in range(cost.stages - 1):
        times[edge, edge + 1] = cost.latency_forward[edge] + cost.occupancy_forward[edge]
        times[edge + 1, edge] = cost.latency_backward[edge] + cost.occupancy_backward[edge]
    usual = median(times.values()) if times else 0.0
    return [edge for edge, time in times.items() if time > _SLOW_FACTOR * usual]


def title_of(case: Case, program: Program) -> str:
    """Return the title of a timeline."""
    return f"{program.name} on {case.name}"


def figures(
    case: Case, simulation: Simulation, bound: Bound | None = None, period_bound: float | None = None
) -> dict[str, Any]:
    """Return the JSON object of ``simulate``; ``plan`` knows the bound of the period too. A job has no bound in it."""
    named = {"name": simulation.program.name, "case": case.name}
    if not case.is_one_pipeline:
        return {**named, **simulation.to_json()}
    return {
        **named,
        **(_NO_BOUND if bound is None else bound.to_json()),
        "gap": _gap(simulation.makespan, bound and bound.value),
        "period": simulation.period,
        **simulation.to_json(),
    } | ({} if period_bound is None else {"period_bound": period_bound})


def _gap(time: float, bound: float | None) -> float | None:
    return None if bound is None or not (math.isfinite(bound) and bound > 0) else time / bound - 1


def headline(case: Case, simulation: Simulation, bound: Bound | None = None, period_bound: float | None = None) -> str:
    """Return lines for people: program and case, the times of one step and of steps in a row, and bubble or memory."""
    program, period = simulation.program, simulation.period
    if not case.is_one_pipeline:
        over = ", ".join(map(str, simulation.over_memory))
        return (
            f"{program.name} on {size_of(case)}\n"
            f"period   {period:.10g}\n"
            f"makespan {simulation.makespan:.10g} of the first step\n"
            f"memory   at most {max(simulation.held)} microbatches{f': too many on worker {over}' if over else ''}\n"
        )
    gap = _gap(simulation.makespan, bound and bound.value)
    above = "" if gap is None else f", {text.percent(max(gap, 0.0))} above the bound"
    of_period = _gap(period, period_bound)
    above_its = "" if of_period is None else f", {text.percent(max(of_period, 0.0))} above its bound"
    idle = 1 - sum(simulation.busy) / (program.ranks * period) if period > 0 else 0.0
    return (
        f"{title_of(case, program)}: {program.stages} stages, {program.ranks} ranks, {program.microbatches} microbatches\n"
        f"makespan {simulation.makespan:.10g}{above}\n"
        f"bound    {'none for programs without gradients' if bound is None else bound}\n"
        f"bubble   {text.percent(simulation.bubble_ratio)}\n"
        f"period   {period:.10g}{above_its}, {text.percent(max(idle, 0.0))} idle\n"
    )


def size_of(case: Case) -> str:
    """Return the name of a case of several replicas and its size."""
    return (
        f"{case.name}: {case.replicas} replicas of {case.stages} stages, {case.workers - len(case.lost)} of {case.workers} "
        f"workers, {case.microbatches} microbatches each"
    )


def as_json(value: dict[str, Any]) -> str:
    """Return one line of JSON. Infinite numbers become null, since JSON has no infinity."""
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


def line_width(options: Namespace) -> int:
    """Return the value of ``--width`` if given, else the width of the terminal."""
    width: int | None = getattr(options, "width", None)
    if width is not None:
        return width
    return max(text.LEAST_WIDTH, os.get_terminal_size(1).columns) if os.isatty(1) else _WIDTH_WITHOUT_TERMINAL
