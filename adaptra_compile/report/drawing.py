"""What all pictures have in common: files, the sizes and boxes of timelines, and shades of colours."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from adaptra.errors import MissingExtraError
from adaptra.report.files import check_suffix, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES: Final = (".svg", ".png")
TEXT: Final = "#222222"
GROUND: Final = "#EEEFF2"

LANE: Final = 0.30
"""The height of a lane in inches."""
GAP: Final = 0.13
"""The gap between lanes in inches."""
_LEAST_WIDTH, _MOST_WIDTH, _WIDTH_PER_OP = 9.0, 30.0, 0.19


class Box(NamedTuple):
    """An op in a picture: its times as they are drawn, its colours, and the text in it if there is room."""

    left: float
    length: float
    face: str
    ink: str
    text: str
    edge: str = "white"


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


def narrow_length(lengths: Sequence[float], whole: float) -> float:
    """Return the length of a narrow box, below which a fifth of all are; ``whole`` if there is no box."""
    return sorted(lengths)[len(lengths) // 5] if lengths else whole


def figure_width(whole: float, narrow: float) -> float:
    """Return the width in inches of a picture in which a narrow box has room for its number."""
    return min(_MOST_WIDTH, max(_LEAST_WIDTH, _WIDTH_PER_OP * whole / narrow))


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
