"""A picture of a job's throughput over a failure trace, above the share of workers that live."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from adaptra.report.drawing import TEXT, write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HOUR: Final = 3600.0


def draw_availability(
    throughput: Sequence[tuple[float, float]], live: Sequence[tuple[float, float]], end: float, path: str | Path, title: str
) -> None:
    """Write the picture. Both curves are steps: a value holds until the next time.

    Args:
        throughput: Seconds, and from then on the throughput as a fraction of the healthy one.
        live: Seconds, and from then on the live workers as a fraction of all.
        end: When both end, in seconds.
        path: A file name ending in ``.svg`` or ``.png``. The file is written atomically.
        title: A heading.

    Raises:
        ReportError: The suffix is unknown, or the folder does not exist.
        MissingExtraError: matplotlib is not installed.
    """

    def compose(figure: Figure) -> None:
        figure.set_size_inches(9.5, 4.2)
        axes = figure.add_axes((0.085, 0.13, 0.89, 0.74))
        for curve, colour, label, order in (
            (live, "#8C8C8C", "workers that live", 2),
            (throughput, "#1F5F99", "throughput", 3),
        ):
            hours = [seconds / _HOUR for seconds, _ in curve] + [end / _HOUR]
            values = [value for _, value in curve] + [curve[-1][1]]
            axes.step(hours, values, where="post", color=colour, linewidth=1.4, zorder=order, label=label)
        axes.set_ylim(0, 1.05)
        axes.set_xlim(0, end / _HOUR)
        axes.set_xlabel("hours", fontsize=9.5, color=TEXT)
        axes.set_ylabel("of the healthy job", fontsize=9.5, color=TEXT)
        axes.tick_params(colors=TEXT, labelsize=9)
        axes.grid(axis="y", color="#DDDFE3", linewidth=0.6, zorder=0)
        axes.legend(loc="lower left", fontsize=9, frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.text(0.085, 0.93, title, fontsize=12.5, weight="bold", color=TEXT)

    write_figure(path, compose)
