"""Tables for people: schedules compared, makespan against delay, the sensitivity of each edge, and responses to losses."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from adaptra.passes.adapt_order import ADAPTED
from adaptra.report.text import percent

if TYPE_CHECKING:
    from adaptra.planning.explaining.comparison import Comparison, Sweep
    from adaptra.planning.responses.responses import Decision
    from adaptra.planning.routes.period_bound import PeriodBound
    from adaptra.simulation.case import Case
    from adaptra.simulation.sensitivity import EdgeSensitivity
    from adaptra.simulation.simulate import Simulation

_BEST: Final = "bold"
_BAD: Final = "red"


def comparison(found: Comparison, width: int) -> str:
    """Return a table with one row per schedule, in the requested order."""
    case, bound = found.case, found.bound
    title = f"{case.name}: {case.cost.stages} stages, {case.microbatches} microbatches, bound {bound}"
    names = ("makespan", "period") if case.barrier else ("period", "makespan")
    table = _table("schedule", names[0], "÷ bound", names[1], "in flight", "bubble", "memory")
    for run in found.runs:
        over = ", ".join(map(str, run.over_memory))
        counts, beside = (run.makespan, run.period) if case.barrier else (run.period, run.makespan)
        table.add_row(
            run.program.name,
            f"{counts:.10g}",
            _ratio(counts, bound.value),
            f"{beside:.10g}",
            str(max(run.peak_in_flight)),
            percent(run.bubble_ratio),
            f"over on rank {over}" if over else "fits" if case.cost.memory_limit else "no limit",
            style=_BAD if over else _BEST if run.program.name == ADAPTED else None,
        )
    return _text(title, table, width)


def job_comparison(case: Case, found: Sequence[tuple[str, Simulation]], bound: PeriodBound, width: int) -> str:
    """Return a table with one row per plan of several replicas, in the requested order; the last is the plan itself."""
    title = f"{case.name}: {case.replicas} replicas of {case.stages} stages, {case.microbatches} microbatches, bound {bound}"
    table = _table("plan", "period", "÷ bound", "makespan", "in flight", "memory")
    for name, run in found:
        over = ", ".join(map(str, run.over_memory))
        table.add_row(
            name,
            f"{run.period:.10g}",
            "-" if run.case != case else _ratio(run.period, bound.value),
            f"{run.makespan:.10g}",
            str(max(run.held)),
            f"over on worker {over}" if over else "fits" if case.memory else "no limit",
            style=_BAD if over else _BEST if name == ADAPTED else None,
        )
    return _text(title, table, width)


def sweep(found: Sweep, width: int) -> str:
    """Return a table with one row per delay and one column per schedule. Times over the memory limit are in brackets."""
    edges = ", ".join(f"{source}→{destination}" for source, destination in found.edges)
    table = _table("delay", "bound", *found.times)
    for row, (delay, bound) in enumerate(zip(found.delays, found.bounds, strict=True)):
        cells = [
            f"({times[row]:.6g})" if found.over_memory[name][row] else f"{times[row]:.6g}"
            for name, times in found.times.items()
        ]
        table.add_row(f"{delay:.6g}", f"{bound:.6g}", *cells)
    return _text(f"{found.case.name}: step time, delay added on edge {edges}", table, width)


def sensitivity(found: Iterable[EdgeSensitivity], width: int) -> str:
    """Return a table with one row per directed edge."""
    table = _table("edge", "absorbs", "beyond, per unit", "paid once up to", "in the end, per unit")
    for edge in found:
        table.add_row(
            f"{edge.source}→{edge.destination}", f"{edge.absorbs:.6g}", str(edge.slope), f"{edge.once:.6g}", str(edge.most)
        )
    return _text("delay added to every message of one edge, and how much longer the step gets", table, width)


def resilience(title: str, rows: Iterable[Mapping[str, Any]], width: int) -> str:
    """Return a table with one row per number of lost workers."""
    table = _table("lost", "per stage", "period", "work", "healthy", "scaled", "of scaled", "1F1B", "held", "decision")
    for row in rows:
        table.add_row(
            str(row["lost"]),
            _runs(row["losses"]),
            *(f"{row[name]:.6g}" for name in ("period", "work_bound", "healthy_period", "fault_scaled_period")),
            f"{row['of_limit']:.3f}",
            f"{row['1f1b_period']:.6g}",
            str(row["held"]),
            row["decision"],
        )
    return _text(title, table, width)


def responses(title: str, found: Decision, width: int) -> str:
    """Return a table with one row per response."""
    table = _table("response", "period", "bound", "costs", "in all", "held")
    table.add_column("what", overflow="fold")
    for one in found.responses:
        figures = ("refused", "", "", "", "")
        if one.period is not None and one.bound is not None:
            times = f"{one.cost:.4g} s", f"{found.seconds(one):.6g} s"
            figures = f"{one.period:.6g}", f"{one.bound:.6g}", *times, str(one.held)
        table.add_row(one.kind.value, *figures, one.what, style=_BEST if one in (found.first, found.then) else None)
    return _text(title, table, width)


def _runs(losses: Sequence[int]) -> str:
    """Return losses per stage as text: ``0×7 1`` for seven stages without a loss and one with."""
    runs = [(value, len(list(run))) for value, run in groupby(losses)]
    return " ".join(str(value) if number == 1 else f"{value}×{number}" for value, number in runs)


def _ratio(makespan: float, bound: float) -> str:
    return f"{makespan / bound:.3f}" if 0 < bound < math.inf else "-"


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _text(title: str, table: Table, width: int) -> str:
    """Return the table with its title as text, coloured if standard output is a terminal."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=os.isatty(1), highlight=False).print(table)
    return title + "\n" + "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).rstrip("\n") + "\n"
