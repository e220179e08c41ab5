"""A picture of times of a step against the delay of an edge: one line per schedule, and the bound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from adaptra.report.drawing import TEXT, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from adaptra.planning.explaining.comparison import Sweep

_COLOURS: Final = {
    "gpipe": "#8C8C8C", "1f1b": "#C8502B", "zb_h1": "#E39B3D", "zb_h2": "#B08A1E", "paper": "#A53C8F",
    "interleaved": "#7A5230", "zbv": "#6B6BB5", "kept": "#5F9E8F", "adapted": "#1F5F99",
}  # fmt: skip
_MEANING: Final = {
    "paper": "the paper's rule, re-planned",
    "kept": "adaptra's plan for the smallest delay, kept",
    "adapted": "adaptra, re-planned",
}
_GROUND: Final = "#E4E6EA"
_MARKED_STEPS: Final = 40
_LINE_SPACING: Final = 0.045


def draw_sweep(sweep: Sweep, path: str | Path, *, title: str | None = None) -> None:
    """Write the picture. The shaded area is below the bound. A line is dotted where its schedule exceeds the memory limit.

    Args:
        sweep: The sweep to draw.
        path: A file name ending in ``.svg`` or ``.png``. The file is written atomically.
        title: A heading of the picture; by default the case and the edges.

    Raises:
        ReportError: The suffix is unknown, or the folder does not exist.
        MissingExtraError: matplotlib is not installed.
    """
    write_figure(path, lambda figure: _compose(figure, sweep, title))


def _compose(figure: Figure, sweep: Sweep, title: str | None) -> None:
    figure.set_size_inches(9.5, 5.2)
    axes = figure.add_axes((0.085, 0.115, 0.58, 0.77))
    axes.fill_between(sweep.delays, sweep.bounds, color=_GROUND, linewidth=0, zorder=1)
    axes.plot(sweep.delays, sweep.bounds, color="#777777", linewidth=1.0, zorder=1.5)
    for name, times in sweep.times.items():
        _line(axes, sweep, name, times)
    highest = max((*sweep.bounds, *(time for found in sweep.times.values() for time in found)))
    axes.set_xlim(sweep.delays[0], sweep.delays[-1] if sweep.delays[-1] > sweep.delays[0] else sweep.delays[0] + 1)
    axes.set_ylim(0, highest * 1.04)
    axes.text(
        0.02, 0.04, "no schedule is shorter", transform=axes.transAxes, fontsize=9, color="#777777", zorder=2,
    )  # fmt: skip
    axes.set_xlabel(f"delay added to each message {_edges(sweep)} (the case's unit)", fontsize=9.5, color=TEXT)
    axes.set_ylabel("step time (the case's unit)", fontsize=9.5, color=TEXT)
    axes.tick_params(colors=TEXT, labelsize=9)
    axes.grid(axis="y", color="#DDDFE3", linewidth=0.6, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    heading = title or f"{sweep.case.name}: {sweep.case.cost.stages} stages, {sweep.case.microbatches} microbatches"
    figure.text(0.085, 0.94, heading, fontsize=12.5, weight="bold", color=TEXT)
    _label_ends(axes, sweep, highest * 1.04)


def _edges(sweep: Sweep) -> str:
    """Return the delayed edges as text. Both directions of an edge are written as one."""
    edges = set(sweep.edges)
    both = {edge for edge in edges if edge[::-1] in edges}
    names = [f"{source}⇄{destination}" for source, destination in sorted(both) if source < destination]
    names += [f"{source}→{destination}" for source, destination in sorted(edges - both)]
    return ("between stages " if edges == both else "on edge ") + ", ".join(names)


def _line(axes: Axes, sweep: Sweep, name: str, times: tuple[float, ...]) -> None:
    """Draw one schedule, dotted between neighbouring delays if it exceeds the memory limit at one of them."""
    over = sweep.over_memory[name]
    width = 2.4 if name == "adapted" else 1.5
    marker = "o" if len(sweep.delays) <= _MARKED_STEPS else None
    style: dict[str, Any] = {"color": _COLOURS[name], "linewidth": width, "zorder": 4 if name == "adapted" else 3}
    for index in range(len(times) - 1):
        part = slice(index, index + 2)
        axes.plot(sweep.delays[part], times[part], linestyle=":" if any(over[part]) else "-", **style)
    if marker is not None or len(times) == 1:
        axes.plot(sweep.delays, times, linestyle="none", marker="o", markersize=3.2, **style)


def _label_ends(axes: Axes, sweep: Sweep, height: float) -> None:
    """Write names beside the ends of the lines, from the bottom up, moved apart if they would touch."""
    ends: list[tuple[str, str, float]] = []
    for name, times in sweep.times.items():
        over = " (over memory)" if any(sweep.over_memory[name]) else ""
        ends.append((_MEANING.get(name, name) + over, _COLOURS[name], times[-1]))
    ends.sort(key=lambda end: end[2])
    places: list[float] = []
    for _, _, value in ends:
        place = min(value / height, 1 - _LINE_SPACING * (len(ends) - len(places) - 1))
        places.append(max(place, places[-1] + _LINE_SPACING) if places else max(place, 0.0))
    for (label, colour, value), place in zip(ends, places, strict=True):
        axes.annotate(
            label, (1, value / height), xycoords="axes fraction", xytext=(1.04, place), textcoords="axes fraction",
            va="center", fontsize=9, color=colour, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 1, "relpos": (0, 0.5)},
        )  # fmt: skip
