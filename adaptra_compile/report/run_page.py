"""A page about a run: measured and predicted iteration times, delays per edge, REDUCE of replicas, and numbered events.

All panels have the steps as their common axis. A number in a circle marks a step with an event, and the list below describes
it. With several replicas a panel shows how long a microbatch takes each worker, and a table what each worker did last.

Forward edges have full lines and backward edges dashed lines, since the two edges of a slow link often coincide.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, repeat
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from adaptra.errors import ReportError
from adaptra.report.drawing import SUFFIXES, TEXT, write_figure
from adaptra.report.files import check_suffix
from adaptra.report.run_records import Happening, Run, worker_lines
from adaptra.simulation.worker_steps import SLOW_PACE, WorkerStep, paces

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FAINT: Final = "#9A9DA5"
_MEASURED: Final = "#1F5F99"
_BAND: Final = "#EEF1F6"
_EDGES: Final = ("#A53C8F", "#C8502B", "#5F9E8F", "#B08A1E", "#6B6BB5", "#7A5230")
"""Colours of outlier edges. If there are more, the rest are grey like ordinary edges."""

_MARKS: Final = {"failed": "#B3261E", "path": "#C8502B", "link": "#C8502B", "agreed": "#1F5F99", "detected": "#B08A1E"}
"""Colours of events, most important first. All other events are grey."""

_STANDS_OUT, _SEEN = 2.0, 0.1
"""Thresholds for an outlier edge: its slowest flight as a multiple of the usual, and as a fraction of the page's slowest."""

# Inches, like everything below that is not a time or a step.
_WIDTH, _LEFT, _RIGHT = 11.0, 0.8, 1.15
_HEAD, _STRIP_ROW, _TIMES, _DELAYS, _WORKERS, _REDUCES, _GAP, _LINE = 0.75, 0.24, 2.5, 1.9, 1.7, 1.5, 0.62, 0.19
_LETTERS: Final = 150
"""The most letters of the heading's second line."""
_LISTED_LETTERS: Final = 130
"""The most letters of a line of the list. The limit leaves room for a wider substitute font."""
_MOST_LISTED: Final = 24
_OFTEN: Final = 2
"""The number of steps in which a worker must be slow to stand out: one may be a pause."""
_MOST_DOTS: Final = 200


@dataclass(frozen=True, slots=True)
class _EventMark:
    """The events of one step, their number on the page, and the row of their circle."""

    number: int
    step: int
    row: int
    happenings: tuple[Happening, ...]

    @property
    def colour(self) -> str:
        kinds = {happening.kind for happening in self.happenings}
        return next((colour for kind, colour in _MARKS.items() if kind in kinds), _FAINT)


def draw_run(run: Run, path: str | Path, *, title: str | None = None) -> None:
    """Write the page.

    Args:
        run: The run to draw.
        path: A file name ending in ``.svg`` or ``.png``. The file is written atomically.
        title: A heading; by default the run's name and size.

    Raises:
        ReportError: The run has no step yet, the suffix is unknown, or the folder does not exist.
        MissingExtraError: matplotlib is not installed.
    """
    check_suffix(path, SUFFIXES)
    if not run.steps:
        raise ReportError(f"{run.folder}: no step was run: expected at least one to draw")
    write_figure(path, lambda figure: _compose(figure, run, title), dpi=120)


def _compose(figure: Figure, run: Run, title: str | None) -> None:
    first, last = run.steps[0].step, max(run.steps[-1].step, run.steps[0].step + 1)
    marks = _marks(_weightiest(run.happenings), last - first)
    lines, workers = _list_of(marks), _table_of_workers(run)
    left_out = len(run.happenings) - sum(len(mark.happenings) for mark in marks)
    if left_out:
        lines.append((f"     and {left_out} more, which adaptra trace prints without -o", TEXT))
    strip = _STRIP_ROW * (1 + max((mark.row for mark in marks), default=0))
    upper = _HEAD + strip + _TIMES + _GAP + _DELAYS + _GAP
    has_reduces, has_workers = any(one.reduces for one in run.replicas), bool(workers)
    panels = upper + (_REDUCES + _GAP if has_reduces else 0.0) + (_WORKERS + _GAP if has_workers else 0.0)
    lines = workers + lines
    height = panels + _LINE * (len(lines) + 1)
    figure.set_size_inches(_WIDTH, height)
    _heading(figure, run, title, height)
    plot = (_WIDTH - _LEFT - _RIGHT) / _WIDTH

    def panel(top: float, tall: float) -> Axes:
        axes = figure.add_axes((_LEFT / _WIDTH, 1 - (top + tall) / height, plot, tall / height))
        axes.set_xlim(first - 0.6, last + 0.6)
        return axes

    top = _HEAD
    _strip(panel(top, strip), marks)
    times = panel(top + strip, _TIMES)
    _bands(times, run)
    _times(times, run)
    delays = panel(top + strip + _TIMES + _GAP, _DELAYS)
    _delays(delays, run)
    below = [delays]
    for is_there, tall, draw in ((has_workers, _WORKERS, _microbatches), (has_reduces, _REDUCES, _reduces)):
        if is_there:
            below[-1].set_xlabel("")
            below.append(panel(upper, tall))
            draw(below[-1], run)
            upper += tall + _GAP
    for axes in (times, *below):
        for mark in marks:
            axes.axvline(mark.step, color=mark.colour, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1.5)
    begin = height - panels
    for index, (line, colour) in enumerate(lines):
        figure.text(
            _LEFT / _WIDTH, (begin - _LINE * (index + 0.5)) / height, line,
            va="center", fontsize=8, color=colour, family="DejaVu Sans Mono",
        )  # fmt: skip


def _heading(figure: Figure, run: Run, title: str | None, height: float) -> None:
    left = _LEFT / _WIDTH
    figure.text(left, 1 - 0.2 / height, title or f"run {run.started.run}", va="top", fontsize=13, weight="bold", color=TEXT)
    notes = textwrap.shorten("; ".join((run.size, *run.notes)), _LETTERS, placeholder=" …")
    figure.text(left, 1 - 0.5 / height, notes, va="top", fontsize=9, color=TEXT)


def _weightiest(happenings: Sequence[Happening]) -> list[Happening]:
    """Return the events that fit on the page, in order. The latest events of the least important kinds are left out."""
    kinds = list(_MARKS)
    weights = [kinds.index(one.kind) if one.kind in kinds else len(kinds) for one in happenings]
    kept = sorted(range(len(happenings)), key=lambda index: weights[index])[:_MOST_LISTED]
    return [happenings[index] for index in sorted(kept)]


def _marks(happenings: Sequence[Happening], steps: int) -> list[_EventMark]:
    """Return one mark per step with an event. Circles that would touch are in different rows."""
    apart = steps * 0.3 / (_WIDTH - _LEFT - _RIGHT)
    free: list[float] = []
    marks: list[_EventMark] = []
    for number, (step, group) in enumerate(groupby(happenings, key=lambda one: one.step), 1):
        row = next((row for row, until in enumerate(free) if until <= step), len(free))
        if row == len(free):
            free.append(step)
        free[row] = step + apart
        marks.append(_EventMark(number, step, row, tuple(group)))
    return marks


def _list_of(marks: Sequence[_EventMark]) -> list[tuple[str, str]]:
    """Return the lines below the panels, with their colours. Long lines are wrapped."""
    lines: list[tuple[str, str]] = []
    for mark in marks:
        colour = TEXT if mark.colour == _FAINT else mark.colour
        for happening in mark.happenings:
            begin = f"{mark.number:>3}  step {happening.step:<6} {happening.kind:<9} "
            wrapped = textwrap.wrap(happening.text, _LISTED_LETTERS - len(begin)) or [""]
            lines += [
                (indent + text, colour) for indent, text in zip(chain([begin], repeat(" " * len(begin))), wrapped, strict=False)
            ]
    return lines


def _strip(axes: Axes, marks: Sequence[_EventMark]) -> None:
    axes.set_axis_off()
    axes.set_ylim(-0.5, max((mark.row for mark in marks), default=0) + 0.5)
    for mark in marks:
        axes.text(
            mark.step, mark.row, str(mark.number), ha="center", va="center", fontsize=7.5, color="white",
            bbox={"boxstyle": "circle,pad=0.25", "facecolor": mark.colour, "edgecolor": "none"},
        )  # fmt: skip


def _bands(axes: Axes, run: Run) -> None:
    """Draw every other plan on a tinted background, each with its name."""
    for index, (version, group) in enumerate(groupby(run.steps, key=lambda step: step.version)):
        steps = [step.step for step in group]
        if index % 2:
            axes.axvspan(steps[0] - 0.5, steps[-1] + 0.5, color=_BAND, linewidth=0, zorder=0)
        axes.annotate(
            f"plan {version}", (steps[0], 0), xycoords=("data", "axes fraction"), xytext=(3, 4),
            textcoords="offset points", fontsize=8.5, color=TEXT,
        )  # fmt: skip


def _times(axes: Axes, run: Run) -> None:
    numbers = [step.step for step in run.steps]
    measured = [1e3 * step.seconds for step in run.steps]
    # The first step includes one-time costs; it must not flatten all others.
    highest = 1.12 * max(measured[1:] or measured)
    axes.plot(numbers, measured, color=_MEASURED, linewidth=1.3, zorder=3, clip_on=True)
    if len(numbers) <= _MOST_DOTS:
        axes.plot(numbers, measured, linestyle="none", marker="o", markersize=3, color=_MEASURED, zorder=3)
    axes.plot(
        numbers, [1e3 * step.predicted for step in run.steps], color=TEXT, linewidth=1.1, linestyle=(0, (5, 2)), zorder=2.5,
        drawstyle="steps-mid",
    )  # fmt: skip
    if measured[0] > highest:
        axes.annotate(
            f"first step {measured[0]:.0f} ms ↑", (numbers[0], 1), xycoords=("data", "axes fraction"), xytext=(4, -11),
            textcoords="offset points", fontsize=8, color=_MEASURED,
        )  # fmt: skip
    axes.set_ylim(0, highest)
    _label_ends(
        axes,
        [("measured", _MEASURED, measured[-1]), ("predicted", TEXT, 1e3 * run.steps[-1].predicted)],
        highest,
    )
    _finish(axes, "iteration (ms)", "")


def _delays(axes: Axes, run: Run) -> None:
    named_flights = run.named_flights
    slowest = {edge: max(flight for _, flight in flights) for edge, flights in named_flights.items()}
    usual = median([min(flight for _, flight in flights) for flights in named_flights.values()] or [0.0])
    least = max(_STANDS_OUT * usual, _SEEN * max(slowest.values(), default=0.0))
    out = sorted((edge for edge in slowest if slowest[edge] > least), key=lambda edge: -slowest[edge])
    colours = dict(zip(out, _EDGES, strict=False))
    ends: list[tuple[str, str, float]] = []
    for edge, flights in named_flights.items():
        steps, values = [step for step, _ in flights], [1e3 * flight for _, flight in flights]
        colour = colours.get(edge, _FAINT)
        style = "-" if edge[0] < edge[1] else (0, (3, 1.5))
        width, order = (1.5, 3) if edge in colours else (0.9, 2)
        axes.plot(steps, values, color=colour, linewidth=width, linestyle=style, zorder=order)
        if edge in colours:
            ends.append((f"{edge[0]}→{edge[1]}", colour, values[-1]))
    if len(colours) < len(named_flights):
        others = [1e3 * flights[-1][1] for edge, flights in named_flights.items() if edge not in colours]
        ends.append(("other edges", _FAINT, median(others)))
    highest = 1.12e3 * max(slowest.values(), default=1e-3)
    axes.set_ylim(0, highest)
    _label_ends(axes, ends, highest)
    _finish(axes, "delay seen (ms)", "step")


def _reduces(axes: Axes, run: Run) -> None:
    """Draw REDUCE of each rank's stages: a full line for what is exposed, and a faint dashed one for the whole.

    The full line has a gap where it is not known.
    """
    by_name: dict[str, list[tuple[int, float, float]]] = {}
    for each in run.replicas:
        place = f"{each.started.replica}." if run.peers else "stage "
        for step in each.reduces:
            for one in step.stages:
                exposed = math.nan if one.exposed is None else one.exposed
                by_name.setdefault(place + one.name, []).append((step.step, 1e3 * one.seconds, 1e3 * exposed))
    ends: list[tuple[str, str, float]] = []
    for (name, points), colour in zip(by_name.items(), chain(_EDGES, repeat(_FAINT)), strict=False):
        steps, whole, exposed = zip(*points, strict=True)
        axes.plot(steps, whole, color=colour, linewidth=0.8, linestyle=(0, (3, 1.5)), alpha=0.6, zorder=2)
        axes.plot(steps, exposed, color=colour, linewidth=1.5, marker="o", markersize=2, zorder=3)
        last = next((value for value in reversed(exposed) if not math.isnan(value)), whole[-1])
        ends.append((name, colour, last))
    # The first step includes one-time costs; it must not flatten all others.
    highest = 1.12 * max(whole for points in by_name.values() for _, whole, _ in points[1:] or points) or 1.0
    axes.set_ylim(0, highest)
    _label_ends(axes, ends, highest)
    _finish(axes, "REDUCE exposed (ms)", "step")


def _microbatches(axes: Axes, run: Run) -> None:
    """Draw how long a microbatch takes each worker. Those that are slower than the others of their stage stand out."""
    slow = _slow_workers(run)
    colours = dict(zip(slow, _EDGES, strict=False))
    ends: list[tuple[str, str, float]] = []
    usual: list[float] = []
    highest = 0.0
    for worker, works in run.works.items():
        points = [(step, 1e3 * work.per_microbatch) for step, work in works if work.per_microbatch is not None]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        colour = colours.get(worker, _FAINT)
        axes.plot(
            steps, values, color=colour, linewidth=1.5 if worker in colours else 0.9, zorder=3 if worker in colours else 2
        )
        # The first step includes one-time costs; it must not flatten all others.
        highest = max(highest, *(values[1:] or values))
        if worker in colours:
            ends.append((works[-1][1].name, colour, values[-1]))
        else:
            usual.append(values[-1])
    if usual:
        ends.append(("other workers" if ends else "workers", _FAINT, median(usual)))
    highest = 1.12 * highest or 1.0
    axes.set_ylim(0, highest)
    _label_ends(axes, ends, highest)
    _finish(axes, "microbatch (ms)", "step")


def _slow_workers(run: Run) -> list[int]:
    """Return the workers that were slower than the others of their stage in two steps or more, the slowest first."""
    by_step: dict[int, list[WorkerStep]] = {}
    for works in run.works.values():
        for step, work in works:
            by_step.setdefault(step, []).append(work)
    slow_paces: dict[int, list[float]] = {}
    for works in by_step.values():
        for worker, pace in paces(works).items():
            if pace >= SLOW_PACE:
                slow_paces.setdefault(worker, []).append(pace)
    often = {worker: max(of_worker) for worker, of_worker in slow_paces.items() if len(of_worker) >= _OFTEN}
    return sorted(often, key=lambda worker: -often[worker])


def _table_of_workers(run: Run) -> list[tuple[str, str]]:
    """Return the table of a job's workers, with its colours. Of many, those come first that are slow, take or give."""
    lines = worker_lines(run)
    if not lines:
        return []
    (head, _), *rows = lines
    works = run.usual_works
    weights = [(not slow, not (work.taken or work.given)) for (_, slow), work in zip(rows, works, strict=True)]
    kept = sorted(sorted(range(len(rows)), key=lambda index: weights[index])[:_MOST_LISTED])
    table = [("workers in the last steps", TEXT), (head, _FAINT)]
    table += [(rows[index][0], _MARKS["failed"] if rows[index][1] else TEXT) for index in kept]
    if len(rows) > len(kept):
        table.append((f"and {len(rows) - len(kept)} more, which adaptra trace prints without -o", TEXT))
    return [*table, ("", TEXT)]


def _finish(axes: Axes, name: str, below: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel(name, fontsize=9.5, color=TEXT)
    axes.set_xlabel(below, fontsize=9.5, color=TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(colors=TEXT, labelsize=8.5)
    axes.grid(axis="y", color="#DDDFE3", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _label_ends(axes: Axes, ends: Sequence[tuple[str, str, float]], height: float) -> None:
    """Write names beside the ends of lines, from the bottom up, moved apart if they would touch."""
    place = -1.0
    for label, colour, value in sorted(ends, key=lambda end: end[2]):
        place = max(min(value / height, 1.0), place + 0.1)
        axes.annotate(
            label, (1, place), xycoords="axes fraction", xytext=(5, 0), textcoords="offset points", va="center",
            fontsize=8.5, color=colour, annotation_clip=False,
        )  # fmt: skip
