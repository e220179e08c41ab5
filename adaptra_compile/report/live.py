"""A table that grows while a model trains: one row per step, drawn in place on a terminal, plain lines elsewhere.

Below it stands what each worker of a job did in the last step whose timeline was given.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from adaptra.report.stage_table import MeasuredStep, lines_of_workers, table_of_workers, worker_rows
from adaptra.simulation.timeline import Timeline
from adaptra.simulation.worker_steps import worker_steps

_COLUMNS: Final = {
    "step": 8,
    "loss": 10,
    "tokens/s": 15,
    "iteration ms": 12,
    "bubble %": 8,
    "plan": 6,
    "slow edges": 10,
    "note": 4,
}
_ABSENT: Final = "-"


class LiveTable:
    """A table with one row per step. Use it as a context manager and call :meth:`update` once per step.

    On a terminal the last ``rows`` steps stay in view and are redrawn in place. If standard output is a file or a pipe, it gets
    a heading and then one aligned line per step, without colours.

    Args:
        console: The console to write to. With None, standard output on the launcher's rank 0, and nothing on other ranks.
        rows: The number of steps in view on a terminal.
        title: A heading.
    """

    def __init__(self, console: Console | None = None, *, rows: int = 12, title: str | None = None) -> None:
        self._console = console if console is not None else Console(soft_wrap=False, quiet=os.environ.get("RANK", "0") != "0")
        self._title = title
        self._rows: deque[tuple[str, ...]] = deque(maxlen=rows)
        self._workers: Table | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self._shown(), console=self._console, auto_refresh=False)
            self._live.start()
        else:
            if self._title is not None:
                self._line(self._title)
            self._line(_aligned(tuple(_COLUMNS)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(
        self,
        *,
        step: int,
        loss: float,
        tokens_per_second: float | None = None,
        iteration_seconds: float | None = None,
        bubble: float | None = None,
        plan_version: int | None = None,
        slow_edges: Iterable[tuple[int, int]] = (),
        note: str = "",
        workers: Timeline | None = None,
        measured: MeasuredStep | None = None,
    ) -> None:
        """Add the row of one step. A value of None shows as ``-``.

        A table of workers costs a round trip of all ranks, since all call ``pipe.timeline()``. So give it every ten steps, say.

        Args:
            step: The step's number.
            loss: Its loss.
            tokens_per_second: Throughput.
            iteration_seconds: Duration of the step in seconds; shown in ms.
            bubble: Idle share of the ranks' time, 0 … 1; shown in %.
            plan_version: The version of the step's plan.
            slow_edges: (sending stage, receiving stage) pairs that currently count as slow.
            note: Any other text, such as "plan switched".
            workers: The measured step from ``pipe.timeline()``. Its workers stand below until those of another step are given:
                see :func:`.stage_table.worker_table`.
            measured: ``pipe.last_step``, for the throughput and the duration where they are not given. A batch without
                tokens shows as samples.
        """
        if iteration_seconds is None and measured is not None:
            iteration_seconds = measured.seconds
        throughput = _ABSENT if tokens_per_second is None else f"{tokens_per_second:,.0f}"
        if tokens_per_second is None and measured is not None:
            throughput = f"{measured.per_second:,.0f}" + ("" if measured.unit == "tokens" else f" {measured.unit}")
        row = (
            str(step),
            f"{loss:.4f}",
            throughput,
            _ABSENT if iteration_seconds is None else f"{1e3 * iteration_seconds:.1f}",
            _ABSENT if bubble is None else f"{100 * bubble:.1f}",
            _ABSENT if plan_version is None else f"v{plan_version}",
            " ".join(f"{source}→{destination}" for source, destination in slow_edges) or _ABSENT,
            note,
        )
        self._rows.append(row)
        rows = [] if workers is None else worker_rows(worker_steps(workers), workers.seconds_per_unit or 1e-3)
        if rows:
            self._workers = table_of_workers(rows, f"workers in step {step}")
        if self._live is not None:
            self._live.update(self._shown(), refresh=True)
            return
        self._line(_aligned(row))
        for line in lines_of_workers(rows) if rows else ():
            self._line(f"    {line}")

    def _shown(self) -> Group:
        return Group(self._table(), *(() if self._workers is None else (self._workers,)))

    def _table(self) -> Table:
        table = Table(title=self._title, title_justify="left")
        for name, width in _COLUMNS.items():
            left = name in ("slow edges", "note")
            table.add_column(name, justify="left" if left else "right", min_width=width, no_wrap=not left)
        for row in self._rows:
            slow = row[6] != _ABSENT
            table.add_row(*row, style="bold magenta" if slow else None)
        return table

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _aligned(row: tuple[str, ...]) -> str:
    *numbers, slow, note = row
    widths = list(_COLUMNS.values())
    right = [text.rjust(width) for text, width in zip(numbers, widths, strict=False)]
    return "  ".join([*right, slow.ljust(widths[-2]), note]).rstrip()
