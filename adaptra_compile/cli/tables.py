"""Tables for people: schedules compared, makespan against delay, the sensitivity of each edge, and responses to losses."""

from __future__ import annotations

import io
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
    from adaptra.collectives.choice import SumPrice
    from adaptra.planning.explaining.comparison import Comparison, Sweep
    from adaptra.planning.responses.responses import Decision
    from adaptra.planning.synchrony.choice import ModeChoice
    from adaptra.simulation.sensitivity import EdgeSensitivity

_BEST: Final = "bold"
_BAD: Final = "red"


def comparison(comparison: Comparison, width: int) -> str:
    """Return a table with one row per plan, in the requested order. The time that the bound is of comes first."""
    case, bound = comparison.case, comparison.bound
    replicas = "" if case.is_one_pipeline else f"{case.replicas} replicas of "
    title = f"{case.name}: {replicas}{case.cost.stages} stages, {case.microbatches} microbatches, bound {bound}"
    times = ("period", "makespan") if comparison.counts_periods else ("makespan", "period")
    table = _table("plan", times[0], "÷ bound", times[1], "in flight", "bubble", "memory")
    limit = case.cost.memory_limit if case.is_one_pipeline else case.memory
    for run in comparison.runs:
        over = ", ".join(map(str, run.over_memory))
        first, second = (run.period, run.makespan) if comparison.counts_periods else (run.makespan, run.period)
        ratio = comparison.of_bound(run)
        table.add_row(
            run.program.name,
            f"{first:.10g}",
            "-" if ratio is None else f"{ratio:.3f}",
            f"{second:.10g}",
            str(max(run.peak_in_flight if case.is_one_pipeline else run.held)),
            percent(run.bubble_ratio),
            f"over on worker {over}" if over else "fits" if limit else "no limit",
            style=_BAD if over else _BEST if run.program.name == ADAPTED else None,
        )
    return _text(title, table, width)


def sweep(sweep: Sweep, width: int) -> str:
    """Return a table with one row per delay and one column per schedule. Times over the memory limit are in brackets."""
    edges = ", ".join(f"{source}→{destination}" for source, destination in sweep.edges)
    table = _table("delay", "bound", *sweep.times)
    for row, (delay, bound) in enumerate(zip(sweep.delays, sweep.bounds, strict=True)):
        cells = [
            f"({times[row]:.6g})" if sweep.over_memory[name][row] else f"{times[row]:.6g}"
            for name, times in sweep.times.items()
        ]
        table.add_row(f"{delay:.6g}", f"{bound:.6g}", *cells)
    return _text(f"{sweep.case.name}: step time, delay added on edge {edges}", table, width)


def sensitivity(edges: Iterable[EdgeSensitivity], width: int) -> str:
    """Return a table with one row per directed edge."""
    table = _table("edge", "absorbs", "beyond, per unit", "paid once up to", "in the end, per unit")
    for edge in edges:
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


def responses(title: str, decision: Decision, width: int) -> str:
    """Return a table with one row per response."""
    table = _table("response", "period", "bound", "costs", "in all", "held")
    table.add_column("what", overflow="fold")
    for response in decision.responses:
        figures = ("refused", "", "", "", "")
        if response.period is not None and response.bound is not None:
            times = f"{response.cost:.4g} s", f"{decision.seconds(response):.6g} s"
            figures = f"{response.period:.6g}", f"{response.bound:.6g}", *times, str(response.held)
        style = _BEST if response in (decision.first, decision.then) else None
        table.add_row(response.kind.value, *figures, response.what, style=style)
    return _text(title, table, width)


def sums(title: str, prices: Iterable[SumPrice], width: int) -> str:
    """Return a table with one row per algorithm, the shortest first."""
    table = _table("algorithm", "own nothing", "parts", "rounds", "seconds", "by equation")
    for index, price in enumerate(prices):
        table.add_row(
            price.way.algorithm,
            ",".join(map(str, price.way.late)) or "-",
            str(price.way.parts),
            str(price.rounds),
            f"{price.seconds:.6g}",
            f"{price.expected:.6g}",
            style=None if index else _BEST,
        )
    return _text(title, table, width)


def modes(title: str, choice: ModeChoice, width: int) -> str:
    """Return a table with one row per synchronisation mode. Updates and times to a loss are over those of exact."""
    table = _table("mode", "s an update", "samples", "age", "updates", "time to loss", "bits")
    for price in choice.prices:
        row, pace = price.to_json(choice.exact), price.pace
        age = f"{pace.age:.3g}" + (f" ≤ {pace.most_age}" if pace.most_age else "")
        figures = (
            "trial" if row[name] is None else f"{'≈ ' if row['trial'] else ''}{row[name]:.3f}"
            for name in ("updates_of_exact", "time_of_exact")
        )
        bits = "same" if price.is_exact else "other"
        style = _BEST if price is choice.chosen else None
        table.add_row(str(price.mode), f"{pace.seconds:.6g}", f"{pace.samples:.4g}", age, *figures, bits, style=style)
    return _text(title, table, width)


def _runs(losses: Sequence[int]) -> str:
    """Return losses per stage as text: ``0×7 1`` for seven stages without a loss and one with."""
    runs = [(value, len(list(run))) for value, run in groupby(losses)]
    return " ".join(str(value) if number == 1 else f"{value}×{number}" for value, number in runs)


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
