"""What a compilation tells of how far it is: to the log, and to whoever waits at a terminal."""

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
"""Called as ``progress(what, done, total)`` whenever one more of ``total`` is done; ``what`` is a participle: "captured"."""

PATIENCE: Final = 3.0
"""Seconds that nobody minds to wait without being told for what."""


def log_progress(what: str, done: int, total: int) -> None:
    """Write to the log, at level INFO."""
    logger.info("%s: %d of %d", what, done, total)


@contextmanager
def shown_progress(console: Console | None = None, *, after: float = PATIENCE) -> Generator[Progress]:
    """What happens within this context is logged, and on a terminal shown as bars, which are gone when it ends.

    Args:
        console: Where to; standard error when None. Nothing is written where that is no terminal.
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
