"""What all pictures have in common: files, the sizes and boxes of timelines, and shades of colours."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from adaptra.errors import MissingExtraError
from adaptra.report.files import check_suffix, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

SUFFIXES: Final = (".svg", ".png")
TEXT: Final = "#222222"
GROUND: Final = "#EEEFF2"
REDUCE: Final = "#7A7D85"
"""Colour of the exposed part of a measured REDUCE. What is hidden, or not known to be exposed, is lighter."""

LANE: Final = 0.30
"""The height of a lane in inches."""
GAP: Final = 0.13
"""The gap between lanes in inches."""
_RIGHT, _AXIS, _POINTS = 0.25, 0.55, 72.0
_LEGEND_LINE, _LEGEND_KEY, _LEGEND_LETTER = 0.2, 0.45, 0.077
_LEAST_WIDTH, _MOST_WIDTH, _WIDTH_PER_OP = 9.0, 30.0, 0.19


class Box(NamedTuple):
    """An op in a picture: its times as they are drawn, its colours, and the text in it if there is room."""

    left: float
    length: float
    face: str
    ink: str
    text: str
    edge: str = "white"


class PanelAxes(NamedTuple):
    """A panel of a figure.

    Attributes:
        axes: Its axes, with the lanes from above in inches.
        last: Whether it is the lowest one.
        points_per_time: The width of a unit of time, in points.
        narrow: The width of a narrow box, in points.
    """

    axes: Axes
    last: bool
    points_per_time: float
    narrow: float


def write_figure(path: str | Path, compose: Callable[[Figure], None], *, dpi: int = 150) -> None:
    """Write the figure that ``compose`` fills to a ``.svg`` or ``.png`` file, which appears whole or not at all.

    Raises:
        ReportError: The suffix is unknown, or the folder does not exist.
        MissingExtraError: matplotlib is not installed.
    """
    suffix = check_suffix(path, SUFFIXES)
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("pictures need matplotlib: pip install 'adaptra[viz]'") from error
    # Text stays text in SVG, so that a picture of thousands of boxes is small and searchable. With the fixed salt the same
    # timelines give the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "adaptra", "font.family": "DejaVu Sans"}):
        figure = Figure()
        compose(figure)
        buffer = io.BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else None
        figure.savefig(buffer, format=suffix[1:], dpi=dpi, facecolor="white", metadata=metadata)
    write_whole(path, buffer.getvalue())


def add_panels(
    figure: Figure,
    heights: Sequence[float],
    lengths: Sequence[float],
    end: float,
    handles: Sequence[Patch | Line2D],
    *,
    title: str | None,
    left: float,
    heading: float,
) -> Iterator[PanelAxes]:
    """Size a figure of panels below each other on the same time axis, with a title and a legend, and yield each panel.

    Args:
        figure: The empty figure.
        heights: The height of each panel in inches.
        lengths: The lengths of all boxes in time.
        end: The end of the time axis.
        handles: The entries of the legend.
        title: A heading of the figure.
        left: Inches on the left for the names of lanes.
        heading: Inches above each panel for its own heading.
    """
    whole = end or 1.0
    narrow = sorted(lengths)[len(lengths) // 5] if lengths else whole  # a fifth of all boxes are narrower
    plot = min(_MOST_WIDTH, max(_LEAST_WIDTH, _WIDTH_PER_OP * whole / narrow)) - left - _RIGHT
    lines = math.ceil(sum(_LEGEND_KEY + _LEGEND_LETTER * len(str(handle.get_label())) for handle in handles) / plot)
    above = 0.08 + (0.3 if title else 0.0)
    head = above + _LEGEND_LINE * lines
    width, height = plot + left + _RIGHT, head + sum(heading + one for one in heights) + _AXIS
    figure.set_size_inches(width, height)
    if title:
        figure.text(left / width, 1 - 0.12 / height, title, va="top", fontsize=13, weight="bold", color=TEXT)
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(left / width, 1 - above / height), borderaxespad=0, borderpad=0,
        ncols=math.ceil(len(handles) / lines), frameon=False, fontsize=9, handlelength=1.5, handletextpad=0.5,
        columnspacing=1.4, labelcolor=TEXT,
    )  # fmt: skip
    points_per_time = plot * _POINTS / (whole * 1.005)
    top = head
    for index, panel in enumerate(heights):
        top += heading
        axes = figure.add_axes((left / width, 1 - (top + panel) / height, plot / width, panel / height))
        axes.set_xlim(0, whole * 1.005)
        axes.set_ylim(panel, 0)
        yield PanelAxes(axes, index == len(heights) - 1, points_per_time, narrow * points_per_time)
        top += panel


def frame(axes: Axes, lanes: Sequence[float], names: Sequence[str], time: str | None) -> None:
    """Name the lanes of a panel, and its time axis if it has a name."""
    axes.set_facecolor(GROUND)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_yticks([lane + LANE / 2 for lane in lanes], names, fontsize=9, color=TEXT)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=time is not None, length=3 if time else 0, colors=TEXT, labelsize=9)
    if time:
        axes.set_xlabel(time, fontsize=9, color=TEXT)


def number_size(points: float, microbatches: int) -> float:
    """Return one font size for all microbatch numbers: as large as a narrow box allows, whose width is in points."""
    return min(8.0, max(4.5, 0.95 * points / (0.64 * len(str(microbatches - 1)))))


def draw_boxes(axes: Axes, lane: float, boxes: Sequence[Box], points_per_time: float, size: float) -> None:
    """Draw the boxes of one lane, each with its text if it has room in the font size."""
    edge = min(0.6, 0.08 * median(box.length for box in boxes) * points_per_time)
    axes.broken_barh(
        [(box.left, box.length) for box in boxes],
        (lane, LANE),
        facecolors=[box.face for box in boxes],
        edgecolors=[box.edge for box in boxes],
        linewidth=edge,
        zorder=3,
    )
    for box in boxes:
        if box.length * points_per_time >= 0.64 * len(box.text) * size:
            axes.text(
                box.left + box.length / 2, lane + LANE / 2, box.text, ha="center", va="center_baseline",
                fontsize=size, color=box.ink, zorder=4,
            )  # fmt: skip


def lighter(colour: str, steps: int) -> str:
    """Return the colour mixed with white, lighter with each step up to three."""
    share = 1 - 0.55 ** min(steps, 3)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)


def signed(number: float) -> str:
    """Return a number with its sign and one decimal."""
    return f"{number:+.1f}".replace("-", "−")
