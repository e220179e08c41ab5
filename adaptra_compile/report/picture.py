"""Timelines as an SVG or PNG picture: ranks × time, with several runs below each other on the same time axis.

Every op is a box with its microbatch in it if there is room. A rank's lane is white while the rank waits. Messages are lines
from the sender's lane to the receiver's. Those of one pipeline's slow edges are arrows in a marked, wider gap. Those of slow
links between workers of several replicas are dashed. :mod:`.panels` says which colours boxes have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from adaptra.errors import ReportError
from adaptra.report.drawing import LANE, SUFFIXES, TEXT, add_panels, draw_boxes, frame, number_size, signed, write_figure
from adaptra.report.files import check_suffix
from adaptra.report.panels import Key, Lane, Lines, Panel, panel_of
from adaptra.simulation.simulate import Simulation
from adaptra.simulation.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

_PERIOD: Final = "#B3261E"
_GAP_GROUND: Final = "#F6E4F1"
_TITLE, _PERIOD_TITLE = 0.36, 0.14


def draw(
    shown: Sequence[tuple[str, Timeline | Simulation]],
    path: str | Path,
    *,
    slow_edges: Iterable[tuple[int, int]] = (),
    title: str | None = None,
) -> None:
    """Write a picture of one or more timelines, the first at the top.

    All share one time axis that starts where the makespan starts. Each has its title and figures as a heading. From the second
    on, these are compared with the first.

    A simulated program of several replicas shows its first three steps, and one period before the end of the last of them. With
    many workers one replica is drawn for all that are alike. Of a measured step of more than 64 workers, the replicas come
    first that compute for others, give microbatches away or are slow.

    Args:
        shown: (title, timeline or simulated program) pairs. Either all are of one pipeline or none, and either all have a known
            unit in seconds or none has.
        path: A file name ending in ``.svg`` or ``.png``. The file is written atomically.
        slow_edges: (sending stage, receiving stage) pairs to mark in one pipeline. A measured timeline in which their messages
            were not slow has no marks: see :func:`.standing_out.slow_in`.
        title: A heading of the whole picture.

    Raises:
        ReportError: There is nothing to draw, sorts are mixed, the suffix is unknown, no timeline has a slow edge, or the
            folder does not exist.
        MissingExtraError: matplotlib is not installed.
    """
    check_suffix(path, SUFFIXES)
    _check_alike([one for _, one in shown])
    slow, most = frozenset(slow_edges), max(one.program.stages for _, one in shown)
    for source, destination in sorted(slow):
        if abs(source - destination) != 1 or not (0 <= source < most and 0 <= destination < most):
            raise ReportError(f"slow edge {source}→{destination}: expected two neighbouring stages of 0..{most - 1}")
    panels = [panel_of(name, one, slow) for name, one in shown]
    write_figure(path, lambda figure: _compose(figure, panels, title))


def _check_alike(shown: Sequence[Timeline | Simulation]) -> None:
    """Refuse what has no time axis in common, and nothing at all.

    Raises:
        ReportError: There is nothing to draw, or units or pipelines and jobs are mixed.
    """
    if not shown:
        raise ReportError("no timeline to draw: expected at least one")
    if len({isinstance(one, Timeline) and one.seconds_per_unit is not None for one in shown}) > 1:
        raise ReportError("timelines in seconds beside timelines in a case's own unit: expected all to be of one sort")
    if len({(one.case if isinstance(one, Simulation) else one.program).is_one_pipeline for one in shown}) > 1:
        raise ReportError("timelines of several replicas beside those of one pipeline: expected all to be of one sort")


def _compose(figure: Figure, panels: Sequence[Panel], title: str | None) -> None:
    first = panels[0]
    boxes = [box for panel in panels for lane in panel.lanes for group in lane.boxes for box in group]
    sheet = add_panels(
        figure,
        [panel.height for panel in panels],
        [box.length for box in boxes if box.length > 0],
        max(panel.last for panel in panels),
        [_handle(key) for key in sorted(frozenset[Key]().union(*(panel.keys for panel in panels)))],
        title=title,
        left=first.left,
        heading=_above(first),
    )
    microbatches = max(panel.microbatches for panel in panels)
    for panel, here in zip(panels, sheet, strict=True):
        axes = here.axes
        _frame(axes, panel, panel.axis if here.last else None)
        for lines in panel.lines:
            _messages(axes, lines)
        for lane in panel.lanes:
            _lane(axes, lane, panel.end)
            for group in filter(None, lane.boxes):
                draw_boxes(axes, lane.place, group, here.points_per_time, number_size(here.narrow, microbatches))
        if panel.period is not None:
            _period(axes, panel.end, panel.period)
        _heading(axes, panel, None if panel is first else first)


def _above(panel: Panel) -> float:
    """Return the inches of a panel's heading."""
    return _TITLE + (0.0 if panel.period is None else _PERIOD_TITLE)


def _frame(axes: Axes, panel: Panel, time: str | None) -> None:
    frame(axes, [lane.place for lane in panel.lanes], [lane.name for lane in panel.lanes], time)
    for upper, lower in panel.gaps:
        axes.axhspan(upper, lower, color=_GAP_GROUND, linewidth=0, zorder=0.5)
    for note in panel.notes:
        axes.annotate(
            note.text, (0, note.place), xytext=(-6, 0), textcoords="offset points", ha="right", va="center",
            fontsize=note.size, weight=note.weight, color=note.colour, annotation_clip=False,
        )  # fmt: skip
    for text in panel.inside:
        axes.text(text.time, text.place, text.text, ha=text.side, va="bottom", fontsize=text.size, color=TEXT)


def _lane(axes: Axes, lane: Lane, end: float) -> None:
    """Draw a lane without its ops: white where its rank waits, hatched if it is lost, with bars for sums over replicas."""
    ground, hatch = ("#F7F7F8", "////") if lane.lost else ("white", None)
    axes.broken_barh(
        [(0, end)], (lane.place, LANE), facecolors=ground, hatch=hatch, edgecolors="#C9CBD1", linewidth=0.5, zorder=1
    )
    if lane.lost:
        axes.text(
            end / 2, lane.place + LANE / 2, "lost", ha="center", va="center_baseline", fontsize=9, color=TEXT,
            bbox={"facecolor": ground, "edgecolor": "none", "pad": 1.5}, zorder=4,
        )  # fmt: skip
    for start, length, colour in lane.bars:
        axes.broken_barh([(start, length)], (lane.place + LANE / 4, LANE / 2), facecolors=colour, linewidth=0, zorder=2.5)


def _messages(axes: Axes, lines: Lines) -> None:
    from matplotlib.collections import LineCollection

    if not lines.arrows:
        look = {"colors": lines.colours, "linewidths": lines.width, "linestyles": lines.style, "alpha": lines.alpha}
        axes.add_collection(LineCollection(lines.ends, zorder=lines.order, **look), autolim=False)
        return
    for start, end in lines.ends:
        axes.annotate(
            "", end, start, zorder=5,
            arrowprops={"arrowstyle": "-|>,head_width=0.16,head_length=0.34", "color": lines.colours, "linewidth": lines.width,
                        "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip


def _period(axes: Axes, end: float, period: float) -> None:
    """Mark one period: the one that ends with the last step shown of the worker that ends it last."""
    for time in (end - period, end):
        axes.axvline(time, color=_PERIOD, linewidth=1.1, linestyle=(0, (4, 2)), zorder=5)
    axes.annotate(
        "", (end, 1.0), (end - period, 1.0), xycoords=("data", "axes fraction"), textcoords=("data", "axes fraction"),
        arrowprops={"arrowstyle": "<->", "color": _PERIOD, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0},
    )  # fmt: skip
    axes.annotate(
        f"period {period:.6g}", (end - period / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
        textcoords="offset points", ha="center", fontsize=9, weight="bold", color=_PERIOD,
    )  # fmt: skip


def _heading(axes: Axes, panel: Panel, first: Panel | None) -> None:
    """Write a panel's title and figures, compared with the first panel's if it is not the first itself."""
    change = ""
    if first is not None and first.compared and panel.compared != first.compared:
        change = f" ({signed(100 * (panel.compared / first.compared - 1))} %)"
        if panel.period is None:
            axes.axvline(first.end, color="#555555", linewidth=1.0, linestyle=(0, (1.5, 2)), zorder=2)
    above = 5 + 13 * (panel.period is not None)
    axes.annotate(
        panel.title, (0, 1), xycoords="axes fraction", xytext=(0, above), textcoords="offset points",
        fontsize=11, weight="bold", color=TEXT,
    )  # fmt: skip
    axes.annotate(
        change.join(panel.heading), (1, 1), xycoords="axes fraction", xytext=(0, above), textcoords="offset points",
        ha="right", fontsize=9.5, color=TEXT,
    )  # fmt: skip


def _handle(key: Key) -> Patch | Line2D:
    """Return an entry of the legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if key.line:
        return Line2D(
            [], [], color=key.colour, linewidth=key.line, alpha=key.alpha, linestyle=key.style, marker=key.marker, markersize=5,
            label=key.label,
        )  # fmt: skip
    return Patch(facecolor=key.colour, edgecolor=key.edge, linewidth=0.7 if key.edge else None, label=key.label)
