"""What every benchmark here shares: rows of ours beside a baseline, printed as a table or, with ``--json``, as rows.

A benchmark builds its parser with :func:`parser`, measures, and hands its rows to :func:`print_rows`. Ours and baseline are
measured in one run, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

STUDENTS_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""By degrees of freedom, half a 95 % interval of a mean in standard errors."""


def half_interval(values: Sequence[float]) -> float | None:
    """How far a 95 % interval of the mean of two to ten values reaches to both sides; None of others."""
    times = STUDENTS_T.get(len(values) - 1)
    return None if times is None else times * statistics.stdev(values) / len(values) ** 0.5


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. ``runs`` is how often each side was measured; ``baseline`` is None where there is nothing to compare."""

    name: str
    ours: float
    baseline: float | None
    unit: str
    runs: int

    @property
    def ratio(self) -> float | None:
        """The baseline in units of ours: above one means that ours is less."""
        return None if self.baseline is None or self.ours == 0 else self.baseline / self.ours

    def to_json(self) -> dict[str, object]:
        """The row as JSON values: name, ours, baseline, ratio, unit, runs."""
        return {**asdict(self), "ratio": self.ratio}


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser that knows ``--json``; a benchmark adds its own arguments."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print the rows as JSON: name, ours, baseline, ratio, unit, runs")
    return made


def print_rows(title: str, rows: Iterable[Row], *, baseline: str = "baseline", as_json: bool = False) -> None:
    """Print the rows on standard output; ``baseline`` says in the table what ours stands beside."""
    rows = list(rows)
    if as_json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption="ratio: baseline / ours")
    table.add_column("what")
    for column in ("ours", baseline, "ratio", "unit", "runs"):
        table.add_column(column, justify="right")
    for row in rows:
        beside = "–" if row.baseline is None else _number(row.baseline)
        ratio = "–" if row.ratio is None else f"{row.ratio:.3g}×"
        table.add_row(row.name, _number(row.ours), beside, ratio, row.unit, str(row.runs))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def median_seconds(runs: int, work: Callable[[], object]) -> float:
    """The median wall-clock time of ``work`` over ``runs`` runs, after one that does not count."""
    work()
    times: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _number(value: float) -> str:
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
