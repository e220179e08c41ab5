"""The table of docs/models.md: what is said of each architecture, and where it stands in the page."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paths import DOCS
from torch import nn

from adaptra.graph import CompiledStages

DOCUMENT = DOCS / "models.md"
STAGES = 4
HEADINGS = ("model", "captured", "stages begin at", "parameters", "processor seconds to compile")


def row_of(name: str, model: nn.Module, compiled: CompiledStages) -> tuple[str, ...]:
    """A model's row but for the seconds.

    A stage begins at the module whose parameters are the first that no earlier stage has. One that has none holds the end of
    the model's computation or its loss.
    """
    seen: set[str] = set()
    begins: list[str] = []
    for stage in compiled.train:
        own = [one for one in stage.parameters if one not in seen]
        seen.update(own)
        begins.append(f"`{own[0].rpartition('.')[0] or own[0]}`" if own else "the end")
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return (name, "as one graph", ", ".join(begins[1:]), f"{count:,}" + (f", {trained:,} trained" if trained < count else ""))


def rows_of(page: str) -> dict[str, tuple[str, ...]]:
    """The rows of the page's table by the model's name."""
    table = page[page.index(_line(HEADINGS)) :].split("\n\n", 1)[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()[2:]]
    return {row[0]: row for row in rows}


def with_rows(page: str, rows: Mapping[str, tuple[str, ...]]) -> str:
    """The page with another table."""
    table = "\n".join([_line(HEADINGS), "|---" * len(HEADINGS) + "|", *map(_line, rows.values())])
    return re.sub(rf"{re.escape(_line(HEADINGS))}\n(\|.*\n)+", lambda _: table + "\n", page)


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
