"""Timelines of several replicas as an SVG or PNG picture: workers × time over several steps, with the period.

Every op is a box in the colour of its home, the replica whose microbatch it computes. The darker it is, the earlier comes its
kind: F, then I, then W. So an op of another replica's microbatch stands out in its row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from adaptra.errors import ReportError
from adaptra.program import Kind, Op
from adaptra.report.drawing import (
    GAP,
    LANE,
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
from adaptra.report.job_rows import JobRows, job_rows
from adaptra.simulation.simulate import Simulation
from adaptra.simulation.timeline import OpInterval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

HOMES: Final = ("#2F78B7", "#C8611F", "#3E8E5A", "#A53C8F", "#8F7A12", "#B23A48", "#1F8A8F", "#6B5B9E")
"""One colour per replica; the ninth has the first again."""

STEPS_SHOWN: Final = 3
UPDATES: Final = {Kind.REDUCE: "#B9BCC4", Kind.STEP: "#4A4D55"}
FOREIGN_EDGE: Final = "#111111"
_SHADE: Final = {Kind.F: 0, Kind.B: 0, Kind.I: 1, Kind.W: 2}
_MEANING: Final = {Kind.F: "dark: F forward", Kind.I: "lighter: I input gradient", Kind.W: "lightest: W weight gradient"}
_PERIOD: Final = "#B3261E"
_MOST_HOMES: Final = 8

# Inches, as everything below that is not a time.
_LEFT, _TITLE, _NOTE, _REPLICA_GAP = 1.35, 0.5, 0.22, 0.16


@dataclass(frozen=True, slots=True)
class _JobPanel:
    """One simulated program with its rows, the vertical positions of these in inches from its top, and where it ends."""

    title: str
    simulated: Simulation
    shown: JobRows
    lanes: tuple[float, ...]
    height: float
    end: float

    def intervals(self, row: int) -> list[OpInterval]:
        """Return the intervals of a row in the steps that are shown."""
        return [interval for step in self.shown.rows[row].steps[:STEPS_SHOWN] for interval in step]


def colour_of(home: int, kind: Kind) -> str:
    """Return the colour of an op of a kind, for a microbatch of the replica ``home``."""
    return UPDATES[kind] if kind.is_update else lighter(HOMES[home % len(HOMES)], _SHADE[kind])


def draw_jobs(simulations: Sequence[tuple[str, Simulation]], path: str | Path, *, title: str | None = None) -> None:
    """Write a picture of one or more simulated programs of several replicas, the first at the top.

    All share one time axis. Each shows its first three steps, and one period before the end of the last of them. With many
    workers one replica is drawn for all that are alike.

    Args:
        simulations: (title, simulated program) pairs.
        path: A file name ending in ``.svg`` or ``.png``. The file is written atomically.
        title: A heading of the whole picture.

    Raises:
        ReportError: There is nothing to draw, the suffix is unknown, or the folder does not exist.
        MissingExtraError: matplotlib is not installed.
    """
    check_suffix(path, SUFFIXES)
    if not simulations:
        raise ReportError("no program to draw: expected at least one")
    panels = [_panel(name, simulated) for name, simulated in simulations]
    write_figure(path, lambda figure: _compose(figure, panels, title))


def _panel(title: str, simulated: Simulation) -> _JobPanel:
    shown = job_rows(simulated)
    lanes: list[float] = []
    place = GAP
    for row, before in zip(shown.rows, (None, *shown.rows), strict=False):
        if before is not None and before.replica != row.replica:
            place += _REPLICA_GAP
        lanes.append(place)
        place += LANE + GAP / 2
    ends = [step[-1].end for row in shown.rows for step in row.steps[:STEPS_SHOWN] if step]
    height = place + (_NOTE if shown.hidden else 0.0)
    return _JobPanel(title, simulated, shown, tuple(lanes), height, max(ends, default=0.0))


def _compose(figure: Figure, panels: Sequence[_JobPanel], title: str | None) -> None:
    rows = [(panel, row) for panel in panels for row in range(len(panel.lanes))]
    lengths = [i.end - i.start for panel, row in rows for i in panel.intervals(row) if i.end > i.start]
    end, heights = max(panel.end for panel in panels), [panel.height for panel in panels]
    microbatches = max(panel.simulated.case.microbatches for panel in panels)
    sheet = add_panels(figure, heights, lengths, end, _legend(panels), title=title, left=_LEFT, heading=_TITLE)
    for panel, here in zip(panels, sheet, strict=True):
        _frame(here.axes, panel, here.last)
        for row in range(len(panel.lanes)):
            _row(here.axes, panel, row, here.points_per_time, number_size(here.narrow, microbatches))
        _period(here.axes, panel)
        _heading(here.axes, panel, None if panel is panels[0] else panels[0])


def _frame(axes: Axes, panel: _JobPanel, last: bool) -> None:
    frame(axes, panel.lanes, [row.name for row in panel.shown.rows], "time (the case's unit)" if last else None)
    for replica, number in panel.shown.stands_for.items():
        if number > 1:
            lane = next(lane for lane, row in zip(panel.lanes, panel.shown.rows, strict=True) if row.replica == replica)
            axes.text(panel.end, lane - 0.02, f"stands for {number} replicas", ha="right", va="bottom", fontsize=8, color=TEXT)
    if panel.shown.hidden:
        axes.text(0, panel.height - 0.04, f"and {panel.shown.hidden} replicas more", va="bottom", fontsize=9, color=TEXT)


def _row(axes: Axes, panel: _JobPanel, row: int, points_per_time: float, size: float) -> None:
    here, lane = panel.shown.rows[row], panel.lanes[row]
    ground, hatch = ("#F7F7F8", "////") if here.lost else ("white", None)
    axes.broken_barh(
        [(0, panel.end)], (lane, LANE), facecolors=ground, hatch=hatch, edgecolors="#C9CBD1", linewidth=0.5, zorder=1
    )
    if here.lost:
        axes.text(
            panel.end / 2, lane + LANE / 2, "lost", ha="center", va="center_baseline", fontsize=9, color=TEXT,
            bbox={"facecolor": ground, "edgecolor": "none", "pad": 1.5}, zorder=4,
        )  # fmt: skip
        return
    own: list[Box] = []
    foreign: list[Box] = []
    for interval in panel.intervals(row):
        op, length = interval.op, interval.end - interval.start
        if length <= 0:
            continue
        home = op.replica
        ink = "white" if op.kind in (Kind.F, Kind.B, Kind.STEP) else "black"
        text = op.kind.value if op.kind.is_update else str(op.microbatch)
        edge = "white" if home == here.replica else FOREIGN_EDGE
        boxes = own if home == here.replica else foreign
        boxes.append(Box(interval.start, length, colour_of(home, op.kind), ink, text, edge))
    for boxes in filter(None, (own, foreign)):
        draw_boxes(axes, lane, boxes, points_per_time, size)


def _period(axes: Axes, panel: _JobPanel) -> None:
    """Mark one period: the one that ends with the last step shown of the worker that ends it last."""
    begin = panel.end - panel.simulated.period
    for time in (begin, panel.end):
        axes.axvline(time, color=_PERIOD, linewidth=1.1, linestyle=(0, (4, 2)), zorder=5)
    axes.annotate(
        "", (panel.end, 1.0), (begin, 1.0), xycoords=("data", "axes fraction"), textcoords=("data", "axes fraction"),
        arrowprops={"arrowstyle": "<->", "color": _PERIOD, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0},
    )  # fmt: skip
    axes.annotate(
        f"period {panel.simulated.period:.6g}", ((begin + panel.end) / 2, 1.0), xycoords=("data", "axes fraction"),
        xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9, weight="bold", color=_PERIOD,
    )  # fmt: skip


def _heading(axes: Axes, panel: _JobPanel, first: _JobPanel | None) -> None:
    case, simulated = panel.simulated.case, panel.simulated
    before = None if first is None else first.simulated.period
    change = "" if not before or before == simulated.period else f" ({signed(100 * (simulated.period / before - 1))} %)"
    counts = {"lost": len(case.lost), "slow": len(case.slow), "links of their own": len(case.links)}
    state = ", ".join(f"{number} {what}" for what, number in counts.items() if number) or "none lost or slow"
    axes.annotate(
        panel.title, (0, 1), xycoords="axes fraction", xytext=(0, 18), textcoords="offset points",
        fontsize=11, weight="bold", color=TEXT,
    )  # fmt: skip
    axes.annotate(
        f"{case.workers} workers, {state} · period {simulated.period:.6g}{change} · at most {max(simulated.held)} in flight",
        (1, 1), xycoords="axes fraction", xytext=(0, 18), textcoords="offset points", ha="right", fontsize=9.5, color=TEXT,
    )  # fmt: skip


def _legend(panels: Sequence[_JobPanel]) -> list[Patch]:
    """Return the entries of the legend: the replicas whose microbatches are in the picture, and how to read a box."""
    rows = [(panel, row) for panel in panels for row in range(len(panel.lanes))]
    seen = {interval.op for panel, row in rows for interval in panel.intervals(row) if interval.end > interval.start}
    rowed = [(panel.shown.rows[row].replica, interval.op) for panel, row in rows for interval in panel.intervals(row)]
    return legend_of_homes(seen, any(op.replica != replica and not op.kind.is_update for replica, op in rowed))


def legend_of_homes(seen: Collection[Op], has_foreign: bool) -> list[Patch]:
    """Return the entries for ops that are in a picture: their replicas and kinds, and the line around those of others."""
    from matplotlib.patches import Patch

    homes = sorted({op.replica for op in seen if not op.kind.is_update})
    handles = [Patch(facecolor=colour_of(home, Kind.F), label=f"replica {home}") for home in homes[:_MOST_HOMES]]
    kinds = {op.kind for op in seen}
    handles += [
        Patch(facecolor=lighter("#666666", _SHADE[kind]), label=meaning) for kind, meaning in _MEANING.items() if kind in kinds
    ]
    handles += [Patch(facecolor=colour, label=kind.value) for kind, colour in UPDATES.items() if kind in kinds]
    if has_foreign:
        handles.append(Patch(facecolor="white", edgecolor=FOREIGN_EDGE, linewidth=0.7, label="outlined: another replica's"))
    return handles
