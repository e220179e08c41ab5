"""A picture of a sum over ranks: who sends and receives what, on one time axis."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from adaptra.collectives.choice import SumCase, SumWay
from adaptra.collectives.ports import Flight
from adaptra.report.drawing import GAP, LANE, TEXT, Box, add_panels, draw_boxes, frame, lighter, number_size, write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TERM, _FOLD, _RESULT, _BOUND = "#C8502B", "#E39B3D", "#1F5F99", "#B3261E"
_LEFT, _HEADING = 1.1, 0.1
_MOST_RANKS: Final = 64
"""The most ranks that are drawn, the first ones."""


def draw_rounds(case: SumCase, way: SumWay, path: str | Path, title: str) -> None:
    """Write the picture: for each rank a lane of what it sends, and a lighter one below of what it receives.

    Numbers are parts of the sum. A lane begins grey where its rank is not there yet. The dashed line is the bound.

    Args:
        case: The sum, and the ports that it travels through.
        way: The algorithm whose rounds are drawn.
        path: A file name ending in ``.svg`` or ``.png``. The file is written atomically.
        title: A heading.

    Raises:
        ReportError: The suffix is unknown, or the folder does not exist.
        MissingExtraError: matplotlib is not installed.
    """
    ports = case.ports
    travels = [*case.flights(way)]

    def compose(figure: Figure) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        shown, last = min(ports.ranks, _MOST_RANKS), max(flight.end for flight in travels)
        lanes = [GAP + 2 * rank * LANE + rank * GAP for rank in range(shown)]
        handles = [
            *(
                Patch(color=colour, label=label)
                for colour, label in ((_TERM, "term"), (_FOLD, "partial sum"), (_RESULT, "sum"))
            ),
            Patch(color=lighter(_RESULT, 2), label="lighter: received"),
            Line2D([], [], color=_BOUND, linestyle="--", label="bound"),
        ]
        lengths = [flight.end - flight.start for flight in travels]
        height = lanes[-1] + 2 * LANE + GAP
        (panel,) = add_panels(figure, [height], lengths, last, handles, title=title, left=_LEFT, heading=_HEADING)
        axes = panel.axes
        frame(axes, lanes, [f"rank {rank}" for rank in range(shown)], "seconds")
        for rank, lane in enumerate(lanes):
            axes.broken_barh([(0, ports.arrivals[rank])], (lane, 2 * LANE), facecolors="#C9CCD2", zorder=2)
            size = number_size(panel.narrow, way.parts)
            for place, end, steps in ((lane, "source", 0), (lane + LANE, "destination", 2)):
                boxes = [_box(flight, ports.ranks, steps) for flight in travels if getattr(flight.message, end) == rank]
                if boxes:
                    draw_boxes(axes, place, boxes, panel.points_per_time, size)
        axes.axvline(case.bound.seconds, color=_BOUND, linestyle="--", linewidth=1.0, zorder=5)

    write_figure(path, compose)


def _box(flight: Flight, ranks: int, steps: int) -> Box:
    """Return the box of a message, lighter by that many steps."""
    part, first, end = flight.message.value
    colour = _TERM if end == first + 1 else _RESULT if end - first == ranks else _FOLD
    return Box(flight.start, flight.end - flight.start, lighter(colour, steps), TEXT if steps else "white", str(part))
