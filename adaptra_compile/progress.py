"""Progress of a compilation, in the log and on a terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)`` after each of ``total`` parts. ``what`` is a participle such as "captured"."""

SHOWN_AFTER: Final = 3.0
"""Seconds before progress bars appear."""


def log_progress(what: str, done: int, total: int) -> None:
    """Log the progress at level INFO."""
    logger.info("%s: %d of %d", what, done, total)


@contextmanager
def shown_progress(console: Console | None = None, *, after: float = SHOWN_AFTER) -> Generator[Progress]:
    """Log the progress within this context, and show it as bars on a terminal. The bars disappear at the end.

    Args:
        console: The terminal; standard error if None. No bars are written if it is not a terminal.
        after: Seconds until bars are shown.
    """
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        yield log_progress
        return
    begun = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Bars(*columns, console=console, transient=True)
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        log_progress(what, done, total)
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done)
        if time.monotonic() - begun >= after:
            bars.start()

    try:
        yield show
    finally:
        if bars.live.is_started:
            bars.stop()
