"""A timeline as plain text, for terminals and log files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from adaptra.errors import ReportError
from adaptra.simulation.timeline import OpInterval, Timeline
from adaptra.simulation.worker_steps import is_foreign, place_of, worker_name

WAITING: Final = "."
RUNNING: Final = "-"
LEAST_WIDTH: Final = 40


def render(timeline: Timeline, width: int = 120) -> str:
    """Return a text of ranks × time: one line per rank, ops as letter and microbatch, dots where the rank waits.

    ::

        1f1b, simulated: makespan 14, bubble 42.9 %
        rank 0 F0F1.......B0..B1..
        rank 1 ..F0F1..B0..B1.....

    If an op's columns have no room for its number, only its letter is shown. An op narrower than half a column may be omitted.
    On ranks with several stages the label is the whole op, such as ``2F0``. With several replicas there is a line for each
    worker, named ``REPLICA.STAGE``, and ops of other replicas' microbatches have small letters.

    Args:
        timeline: The timeline to show.
        width: The length of the longest line in characters, at least 40.

    Returns:
        The text, ending in a newline, without colours and in ASCII only.

    Raises:
        ReportError: ``width`` is below 40.
    """
    check_width(width)
    program = timeline.program
    labels = {
        rank: f"rank {rank} " if program.is_one_pipeline else f"{worker_name(*place_of(program, rank))} "
        for rank in program.routing.live
    }
    margin = max(map(len, labels.values()), default=0)
    lines = [summary(timeline)]
    for rank, label in labels.items():
        lines.append(label.ljust(margin) + _lane(timeline, timeline.ops[rank], width - margin))
    return "\n".join(lines) + "\n"


def summary(timeline: Timeline) -> str:
    """Return one line with the program's name, the origin of the times, makespan and bubble."""
    name, source = timeline.program.name, timeline.source.value
    return f"{name}, {source}: makespan {duration(timeline, timeline.makespan)}, bubble {percent(bubble_ratio(timeline))}"


def bubble_ratio(timeline: Timeline) -> float:
    """Return the idle share of the time within the makespan of all ranks that live, 0 … 1."""
    live, bubble = timeline.program.routing.live, timeline.bubble
    whole = timeline.makespan * len(live)
    return sum(bubble[rank] for rank in live) / whole if whole else 0.0


def percent(ratio: float) -> str:
    """Return a share as ``12.3 %``."""
    return f"{100 * ratio:.1f} %"


def duration(timeline: Timeline, time: float) -> str:
    """Return a time as text for people: in ms if the timeline's unit is known, else in the case's own unit without a name."""
    if timeline.seconds_per_unit is None:
        return f"{time:.6g}"
    return f"{1e3 * time * timeline.seconds_per_unit:.4g} ms"


def origin(timeline: Timeline) -> float:
    """Return the time from which the makespan counts."""
    return timeline.end - timeline.makespan


def lane(boxes: Iterable[tuple[float, float, str]], scale: float, columns: int) -> str:
    """Return one line of (start, end, label) boxes, with ``scale`` columns per time, and dots elsewhere.

    A label without room is cut to its first letter.
    """
    cells = [WAITING] * columns
    for start, end, label in boxes:
        first, last = (min(columns, round(time * scale)) for time in (start, end))
        if len(label) > last - first:
            label = next(filter(str.isalpha, label))
        cells[first:last] = label[: last - first].ljust(last - first, RUNNING)
    return "".join(cells)


def check_width(width: int) -> None:
    """Refuse a width that shows nothing.

    Raises:
        ReportError: ``width`` is below :data:`LEAST_WIDTH`.
    """
    if width < LEAST_WIDTH:
        raise ReportError(f"width {width}: expected at least {LEAST_WIDTH} characters")


def _lane(timeline: Timeline, order: tuple[OpInterval, ...], columns: int) -> str:
    several = len({interval.op.stage for interval in order}) > 1
    zero, scale = origin(timeline), columns / timeline.makespan if timeline.makespan else 0.0
    return lane(((i.start - zero, i.end - zero, _label(timeline, i, several)) for i in order), scale, columns)


def _label(timeline: Timeline, interval: OpInterval, with_stage: bool) -> str:
    op = interval.op
    letter = op.kind.value.lower() if is_foreign(timeline.program, interval) else op.kind.value
    return f"{op.stage if with_stage else ''}{letter}{op.microbatch}"
