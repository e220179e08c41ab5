"""Timelines of a step of several replicas as an SVG or PNG picture: a row per worker, by replica.

Every op has the colour of its home, the replica whose microbatch it computes, as in :mod:`.job_picture`. Below a worker's name
stands for whom it waited longest. Lines are messages. Those that another replica's worker sends or receives have the colour of
their microbatch's home. Those of links that were unusually slow are dashed and thick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from adaptra.program import Kind
from adaptra.report.drawing import (
    GAP,
    LANE,
    SUFFIXES,
    TEXT,
    Box,
    add_panels,
    draw_boxes,
    frame,
    number_size,
    write_figure,
)
from adaptra.report.files import check_suffix
from adaptra.report.job_picture import FOREIGN_EDGE, colour_of, legend_of_homes
from adaptra.report.job_rows import MOST_ROWS
from adaptra.report.picture import MESSAGE, TimelinePanel, check_alike, draw_heading, legend_of_reduces
from adaptra.report.text import duration
from adaptra.simulation.standing_out import slow_links_of
from adaptra.simulation.timeline import MessageInterval, Timeline
from adaptra.simulation.worker_steps import SLOW_PACE, WorkerStep, is_foreign, paces, worker_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

_MESSAGE: Final = "#8A8D95"
_SLOW: Final = "#B3261E"
_DASHES: Final = (0, (2.5, 1))
_FAINT: Final = "#6B6E76"

# Inches, as everything below that is not a time.
_LEFT, _TITLE, _NOTE, _REPLICA_GAP = 1.75, 0.36, 0.22, 0.2


@dataclass(frozen=True, slots=True)
class _StepPanel(TimelinePanel):
    """One timeline, the workers that are shown, how many replicas are not, and the slow links."""

    workers: tuple[WorkerStep, ...]
    paces: dict[int, float]
    hidden: int
    slow: frozenset[tuple[int, int]]


def draw_steps(timelines: Sequence[tuple[str, Timeline]], path: str | Path, *, title: str | None = None) -> None:
    """Write a picture of one or more timelines of several replicas, the first at the top, on one time axis.

    Of more than 64 workers, the replicas come first that compute for others, give microbatches away or are slow.

    Args:
        timelines: (title, timeline) pairs, all of several replicas. Either all have a known unit in seconds or none.
        path: A file name ending in ``.svg`` or ``.png``. The file is written atomically.
        title: A heading of the whole picture.

    Raises:
        ReportError: There is no timeline, one is of a single pipeline, units are mixed, the suffix is unknown, or the folder
            does not exist.
        MissingExtraError: matplotlib is not installed.
    """
    check_suffix(path, SUFFIXES)
    check_alike(timelines)
    panels = [_panel(name, timeline) for name, timeline in timelines]
    write_figure(path, lambda figure: _compose(figure, panels, title))


def _panel(title: str, timeline: Timeline) -> _StepPanel:
    steps = worker_steps(timeline)
    relative = paces(steps)
    shown = _shown(steps, relative)
    lanes: dict[int, float] = {}
    place, before = GAP, None
    for one in shown:
        place += _REPLICA_GAP if before not in (None, one.replica) else 0.0
        lanes[one.worker], before = place, one.replica
        place += LANE + GAP
    hidden = len({one.replica for one in steps}) - len({one.replica for one in shown})
    slow = frozenset(slow_links_of(timeline))
    return _StepPanel(title, timeline, lanes, place + (_NOTE if hidden else 0.0), shown, relative, hidden, slow)


def _shown(steps: Sequence[WorkerStep], relative: dict[int, float]) -> tuple[WorkerStep, ...]:
    """Return the workers of the replicas that fit, in order: first those whose workers share, then those with slow ones."""
    by_replica: dict[int, list[WorkerStep]] = {}
    for one in sorted(steps, key=lambda each: (each.replica, each.stages)):
        by_replica.setdefault(one.replica, []).append(one)

    def weight(replica: int) -> tuple[bool, float, int]:
        mine = by_replica[replica]
        return not any(one.taken or one.given for one in mine), -max(relative.get(one.worker, 1.0) for one in mine), replica

    kept: list[int] = []
    for replica in sorted(by_replica, key=weight):
        if kept and sum(len(by_replica[one]) for one in (*kept, replica)) > MOST_ROWS:
            break
        kept.append(replica)
    return tuple(one for replica in sorted(kept) for one in by_replica[replica])


def _compose(figure: Figure, panels: Sequence[_StepPanel], title: str | None) -> None:
    shown = [(p, i) for p in panels for worker in p.lanes for i in p.timeline.ops[worker]]
    lengths = [(i.end - i.start) * p.scale for p, i in shown if i.end > i.start]
    end, heights = max(panel.last for panel in panels), [panel.height for panel in panels]
    microbatches = max(panel.timeline.program.microbatches for panel in panels)
    sheet = add_panels(figure, heights, lengths, end, _legend(panels), title=title, left=_LEFT, heading=_TITLE)
    for panel, here in zip(panels, sheet, strict=True):
        _frame(here.axes, panel, here.last)
        _messages(here.axes, panel)
        panel.draw_reduces(here.axes)
        for worker, lane in panel.lanes.items():
            _row(here.axes, panel, worker, lane, here.points_per_time, number_size(here.narrow, microbatches))
        draw_heading(here.axes, panel.title, panel.timeline, panel.end, None if panel is panels[0] else panels[0].end)


def _frame(axes: Axes, panel: _StepPanel, last: bool) -> None:
    frame(axes, list(panel.lanes.values()), [""] * len(panel.lanes), panel.time_label if last else None)
    names = {one.worker: one.name for one in panel.workers}
    for one in panel.workers:
        lane, pace = panel.lanes[one.worker], panel.paces.get(one.worker, 1.0)
        slow = pace >= SLOW_PACE
        label = f"{one.name} · {pace:.1f}× slow" if slow else one.name
        _beside(axes, lane + 0.1, label, 9.0, _SLOW if slow else TEXT, "bold")
        if one.waits:
            whom, seconds = one.waits[0]
            name = names.get(whom, f"worker {whom}")
            _beside(axes, lane + 0.235, f"waits for {name}: {duration(panel.timeline, seconds)}", 6.8, _FAINT, "normal")
    if panel.hidden:
        axes.text(0, panel.height - 0.04, f"and {panel.hidden} replicas more", va="bottom", fontsize=9, color=TEXT)


def _beside(axes: Axes, place: float, text: str, size: float, colour: str, weight: str) -> None:
    axes.annotate(
        text, (0, place), xytext=(-6, 0), textcoords="offset points", ha="right", va="center", fontsize=size, color=colour,
        weight=weight, annotation_clip=False,
    )  # fmt: skip


def _row(axes: Axes, panel: _StepPanel, worker: int, lane: float, points_per_time: float, size: float) -> None:
    program = panel.timeline.program
    panel.draw_lane(axes, lane)
    own: list[Box] = []
    foreign: list[Box] = []
    for interval in panel.timeline.ops[worker]:
        op, length = interval.op, (interval.end - interval.start) * panel.scale
        away = is_foreign(program, interval)
        ink = "white" if op.kind in (Kind.F, Kind.B) else "black"
        face, edge = colour_of(op.replica, op.kind), FOREIGN_EDGE if away else "white"
        (foreign if away else own).append(Box(panel.time(interval.start), length, face, ink, str(op.microbatch), edge))
    for boxes in filter(None, (own, foreign)):
        draw_boxes(axes, lane, boxes, points_per_time, size)


def _messages(axes: Axes, panel: _StepPanel) -> None:
    from matplotlib.collections import LineCollection

    shown = [one for one in panel.timeline.messages if all(end in panel.lanes for end in panel.timeline.ends_of(one))]
    slow = [one for one in shown if panel.timeline.ends_of(one) in panel.slow]
    lines = [panel.line(one) for one in slow]
    axes.add_collection(LineCollection(lines, colors=MESSAGE, linewidths=2.0, linestyles=_DASHES, zorder=2.2), autolim=False)
    for crosses, width, alpha in ((False, 0.7, 0.7), (True, 1.3, 0.95)):
        mine = [one for one in shown if _crosses(panel.timeline, one) is crosses]
        colours = [colour_of(one.replica, Kind.F) if crosses else _MESSAGE for one in mine]
        lines = [panel.line(one) for one in mine]
        axes.add_collection(LineCollection(lines, colors=colours, linewidths=width, alpha=alpha, zorder=2), autolim=False)


def _crosses(timeline: Timeline, message: MessageInterval) -> bool:
    """Return whether a message leaves its home: another replica's worker sends or receives it."""
    routing = timeline.program.routing
    return any(routing.replica_of(end) != message.replica for end in timeline.ends_of(message))


def _legend(panels: Sequence[_StepPanel]) -> list[Patch | Line2D]:
    from matplotlib.lines import Line2D

    shown = [(panel.timeline, i) for panel in panels for worker in panel.lanes for i in panel.timeline.ops[worker]]
    has_foreign = any(is_foreign(timeline.program, interval) for timeline, interval in shown)
    handles: list[Patch | Line2D] = [*legend_of_homes({interval.op for _, interval in shown}, has_foreign)]
    handles += legend_of_reduces(panels)
    if any(panel.timeline.messages for panel in panels):
        handles.append(Line2D([], [], color=_MESSAGE, linewidth=0.9, label="message"))
    if any(_crosses(panel.timeline, one) for panel in panels for one in panel.timeline.messages):
        handles.append(Line2D([], [], color=colour_of(0, Kind.F), linewidth=1.4, label="crosses replicas"))
    if any(panel.slow for panel in panels):
        handles.append(Line2D([], [], color=MESSAGE, linewidth=2.0, linestyle=_DASHES, label="on a slow link"))
    return handles
