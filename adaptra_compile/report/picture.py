"""Timelines as an SVG or PNG picture: ranks × time, with several runs below each other on the same time axis.

Every op is a box in the colour of its kind, with its microbatch in it if there is room. A rank's lane is white while the rank
waits. Messages are lines from the sender's lane to the receiver's. Those of slow edges are arrows in a marked, wider gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from adaptra.errors import ReportError
from adaptra.program import Kind
from adaptra.report.drawing import (
    GAP,
    LANE,
    REDUCE,
    SUFFIXES,
    TEXT,
    Box,
    add_panels,
    draw_boxes,
    frame,
    lighter,
    number_size,
    signed,
    write_figure,
)
from adaptra.report.files import check_suffix
from adaptra.report.text import bubble_ratio, duration, origin, percent
from adaptra.simulation.standing_out import slow_in
from adaptra.simulation.timeline import MessageInterval, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

COLOURS: Final = {Kind.F: "#2F78B7", Kind.I: "#F2A93B", Kind.W: "#8FD3BF", Kind.B: "#C8502B"}
"""One colour per compute kind. They differ without red-green vision; in grey, F and B differ from I and W."""

MESSAGE: Final = "#A53C8F"
_INK: Final = {Kind.F: "white", Kind.I: "black", Kind.W: "black", Kind.B: "white"}
_MEANING: Final = {Kind.F: "F forward", Kind.I: "I input gradient", Kind.W: "W weight gradient", Kind.B: "B both gradients"}
_SLOW_GROUND: Final = "#F6E4F1"

# Inches, as everything below that is not a time.
_SLOW_GAP = 0.46
_LEFT, _PANEL_TITLE = 0.95, 0.36


@dataclass(frozen=True, slots=True)
class TimelinePanel:
    """One timeline of a picture, with the vertical positions of the lanes that it shows, in inches from its top, by rank."""

    title: str
    timeline: Timeline
    lanes: Mapping[int, float]
    height: float

    @property
    def scale(self) -> float:
        """The factor of times: they are milliseconds if the unit is known, else in the case's own unit."""
        return 1e3 * (self.timeline.seconds_per_unit or 1e-3)

    @property
    def time_label(self) -> str:
        """The name of the time axis."""
        return "time (ms)" if self.timeline.seconds_per_unit else "time (the case's unit)"

    def time(self, value: float) -> float:
        """Return where a time is on the axis."""
        return (value - origin(self.timeline)) * self.scale

    @property
    def end(self) -> float:
        """The end of the makespan on the axis."""
        return self.timeline.makespan * self.scale

    @property
    def last(self) -> float:
        """The end of the last op or sum over replicas."""
        return max((self.end, *(self.time(reduce.end) for reduce in self.timeline.reduces)))

    def draw_lane(self, axes: Axes, lane: float) -> None:
        """Draw a lane without ops: its rank waits."""
        axes.broken_barh([(0, self.end)], (lane, LANE), facecolors="white", edgecolors="#C9CBD1", linewidth=0.5, zorder=1)

    def draw_reduces(self, axes: Axes) -> None:
        """Draw the sums over replicas as narrow bars behind the ops of their ranks."""
        for reduce in self.timeline.reduces:
            if (lane := self.lanes.get(reduce.rank)) is None:
                continue
            turn = reduce.end - (reduce.exposed or 0.0)
            for start, end, colour in ((reduce.start, turn, lighter(REDUCE, 1)), (turn, reduce.end, REDUCE)):
                if end > start:
                    span = self.time(start), (end - start) * self.scale
                    axes.broken_barh([span], (lane + LANE / 4, LANE / 2), facecolors=colour, linewidth=0, zorder=2.5)

    def line(self, message: MessageInterval) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the ends of a message's line: the border of the sender's lane that faces the receiver's, and vice versa."""
        source, destination = (self.lanes[end] for end in self.timeline.ends_of(message))
        down = source < destination
        return (
            (self.time(message.departed), source + (LANE if down else 0.0)),
            (self.time(message.arrived), destination + (0.0 if down else LANE)),
        )


def legend_of_reduces(panels: Sequence[TimelinePanel]) -> list[Patch]:
    """Return the legend's entries for the sums over replicas that are in a picture."""
    from matplotlib.patches import Patch

    reduces = [reduce for panel in panels for reduce in panel.timeline.reduces]
    handles = [Patch(facecolor=lighter(REDUCE, 1), label="REDUCE over replicas")] if reduces else []
    if any(reduce.exposed for reduce in reduces):
        handles.append(Patch(facecolor=REDUCE, label="REDUCE, exposed"))
    return handles


@dataclass(frozen=True, slots=True)
class _Panel(TimelinePanel):
    """The same of one pipeline, with its slow edges and their wider gaps: where each begins and ends, and its label."""

    gaps: tuple[tuple[float, float, str], ...]
    slow: frozenset[tuple[int, int]]


def draw(
    timelines: Sequence[tuple[str, Timeline]],
    path: str | Path,
    *,
    slow_edges: Iterable[tuple[int, int]] = (),
    title: str | None = None,
) -> None:
    """Write a picture of one or more timelines, the first at the top.

    All share one time axis that starts where the makespan starts. From the second on, a dotted line marks the end of the first.
    Each has its title, makespan and bubble as a heading.

    Args:
        timelines: (title, timeline) pairs. Either all have a known unit in seconds or none has.
        path: A file name ending in ``.svg`` or ``.png``. The file is written atomically.
        slow_edges: (sending stage, receiving stage) pairs to mark. A measured timeline in which their messages were not slow
            has no marks: see :func:`.standing_out.slow_in`.
        title: A heading of the whole picture.

    Raises:
        ReportError: There are no timelines, units are mixed, the suffix is unknown, no timeline has a slow edge, or the folder
            does not exist.
        MissingExtraError: matplotlib is not installed.
    """
    check_suffix(path, SUFFIXES)
    panels = _panels(timelines, frozenset(slow_edges))
    write_figure(path, lambda figure: _compose(figure, panels, title))


def check_alike(timelines: Sequence[tuple[str, Timeline]]) -> None:
    """Refuse timelines that have no time axis in common, and none at all.

    Raises:
        ReportError: There are no timelines, or units or pipelines and jobs are mixed.
    """
    if not timelines:
        raise ReportError("no timeline to draw: expected at least one")
    units = [timeline.seconds_per_unit for _, timeline in timelines]
    if None in units and any(unit is not None for unit in units):
        raise ReportError("timelines in seconds beside timelines in a case's own unit: expected all to be of one sort")
    if len({timeline.program.is_one_pipeline for _, timeline in timelines}) > 1:
        raise ReportError("timelines of several replicas beside those of one pipeline: expected all to be of one sort")


def _panels(timelines: Sequence[tuple[str, Timeline]], slow: frozenset[tuple[int, int]]) -> list[_Panel]:
    check_alike(timelines)
    most = max(timeline.program.stages for _, timeline in timelines)
    for source, destination in sorted(slow):
        if abs(source - destination) != 1 or not (0 <= source < most and 0 <= destination < most):
            raise ReportError(f"slow edge {source}→{destination}: expected two neighbouring stages of 0..{most - 1}")
    return [_panel(name, timeline, slow_in(timeline, slow)) for name, timeline in timelines]


def _panel(name: str, timeline: Timeline, slow: frozenset[tuple[int, int]]) -> _Panel:
    placement = timeline.program.placement
    marked: dict[int, list[str]] = {}
    for source, destination in sorted(slow):
        if max(source, destination) >= len(placement) or abs(placement[source] - placement[destination]) != 1:
            continue
        names = marked.setdefault(min(placement[source], placement[destination]), [])
        if f"{destination}→{source}" in names:
            names[names.index(f"{destination}→{source}")] = f"{destination}⇄{source}"
        else:
            names.append(f"{source}→{destination}")
    lanes: dict[int, float] = {}
    gaps: list[tuple[float, float, str]] = []
    place = GAP
    for rank in range(len(timeline.ops)):
        lanes[rank] = place
        place += LANE
        if rank in marked:
            gaps.append((place, place + _SLOW_GAP, "slow " + "\n".join(marked[rank])))
        place += _SLOW_GAP if rank in marked else GAP
    return _Panel(name, timeline, lanes, place, tuple(gaps), slow)


def _compose(figure: Figure, panels: Sequence[_Panel], title: str | None) -> None:
    lengths = [(i.end - i.start) * p.scale for p in panels for i in p.timeline if i.end > i.start]
    end, heights = max(panel.last for panel in panels), [panel.height for panel in panels]
    microbatches = max(panel.timeline.program.microbatches for panel in panels)
    sheet = add_panels(figure, heights, lengths, end, _legend(panels), title=title, left=_LEFT, heading=_PANEL_TITLE)
    for panel, here in zip(panels, sheet, strict=True):
        _frame(here.axes, panel, here.last)
        for lane in panel.lanes.values():
            panel.draw_lane(here.axes, lane)
        _messages(here.axes, panel)
        panel.draw_reduces(here.axes)
        _ops(here.axes, panel, here.points_per_time, number_size(here.narrow, microbatches))
        draw_heading(here.axes, panel.title, panel.timeline, panel.end, None if panel is panels[0] else panels[0].end)


def _frame(axes: Axes, panel: _Panel, last: bool) -> None:
    stages_of = [[s for s, r in enumerate(panel.timeline.program.placement) if r == rank] for rank in range(len(panel.lanes))]
    labels = [
        f"rank {rank}" if stages == [rank] else f"rank {rank} ({'+'.join(map(str, stages))})"
        for rank, stages in enumerate(stages_of)
    ]
    frame(axes, list(panel.lanes.values()), labels, panel.time_label if last else None)
    for upper, lower, names in panel.gaps:
        axes.axhspan(upper, lower, color=_SLOW_GROUND, linewidth=0, zorder=0.5)
        axes.annotate(
            names,
            (0, (upper + lower) / 2),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8,
            weight="bold",
            color=MESSAGE,
            annotation_clip=False,
        )


def _ops(axes: Axes, panel: _Panel, points_per_time: float, size: float) -> None:
    order_of_stage = _order_on_rank(panel.timeline.program.placement)
    for kind, colour in COLOURS.items():
        for lane, order in zip(panel.lanes.values(), panel.timeline.ops, strict=True):
            boxes = [
                Box(
                    panel.time(i.start),
                    (i.end - i.start) * panel.scale,
                    lighter(colour, order_of_stage[i.op.stage]),
                    "black" if order_of_stage[i.op.stage] else _INK[kind],
                    str(i.op.microbatch),
                )
                for i in order
                if i.op.kind is kind
            ]
            if boxes:
                draw_boxes(axes, lane, boxes, points_per_time, size)


def _messages(axes: Axes, panel: _Panel) -> None:
    from matplotlib.collections import LineCollection

    usual = [panel.line(m) for m in panel.timeline.messages if (m.source, m.destination) not in panel.slow]
    marked = [panel.line(m) for m in panel.timeline.messages if (m.source, m.destination) in panel.slow]
    axes.add_collection(LineCollection(usual, colors=MESSAGE, linewidths=0.7, alpha=0.55, zorder=2), autolim=False)
    for start, end in marked:
        axes.annotate(
            "", end, start, zorder=5,
            arrowprops={"arrowstyle": "-|>,head_width=0.16,head_length=0.34", "color": MESSAGE, "linewidth": 1.0,
                        "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip


def draw_heading(axes: Axes, title: str, timeline: Timeline, end: float, first: float | None) -> None:
    """Write a panel's title, and its timeline's makespan and bubble.

    Args:
        axes: The panel's.
        title: The title.
        timeline: The timeline.
        end: Where its makespan ends on the time axis.
        first: Where that of the first panel ends, to compare with; None in the first panel itself.
    """
    axes.annotate(
        title, (0, 1), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points",
        fontsize=11, weight="bold", color=TEXT,
    )  # fmt: skip
    change = ""
    if first and end != first:
        change = f" ({signed(100 * (end / first - 1))} %)"
        axes.axvline(first, color="#555555", linewidth=1.0, linestyle=(0, (1.5, 2)), zorder=2)
    axes.annotate(
        f"{timeline.source.value} · makespan {duration(timeline, timeline.makespan)}{change}"
        f" · bubble {percent(bubble_ratio(timeline))}",
        (1, 1), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points",
        ha="right", fontsize=9.5, color=TEXT,
    )  # fmt: skip


def _legend(panels: Sequence[_Panel]) -> list[Patch | Line2D]:
    """Return the entries of the legend: only kinds that are in the picture."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen = {interval.op.kind for panel in panels for interval in panel.timeline}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=colour, label=_MEANING[kind]) for kind, colour in COLOURS.items() if kind in seen
    ]
    handles.append(Patch(facecolor="white", edgecolor="#9A9DA5", linewidth=0.7, label="waiting"))
    handles += legend_of_reduces(panels)
    if any(panel.timeline.messages for panel in panels):
        handles.append(Line2D([], [], color=MESSAGE, linewidth=0.9, alpha=0.6, label="message"))
    if any(panel.slow for panel in panels):
        handles.append(Line2D([], [], color=MESSAGE, linewidth=1.4, marker=">", markersize=5, label="message on a slow edge"))
    if any(panel.timeline.program.ranks < panel.timeline.program.stages for panel in panels):
        handles.append(Patch(facecolor=lighter(COLOURS[Kind.F], 1), label="lighter: the rank's later stages"))
    return handles


def _order_on_rank(placement: Sequence[int]) -> tuple[int, ...]:
    """Return, per stage, the number of earlier stages on its rank."""
    return tuple(placement[:stage].count(rank) for stage, rank in enumerate(placement))
