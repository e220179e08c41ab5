"""The table of a compiled pipeline: work, memory and messages of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from adaptra.graph import TrainStage
    from adaptra.program import Program

_UNITS = ("", "k", "M", "G", "T", "P")


def stage_table(stages: Sequence[TrainStage], program: Program, in_flight: Sequence[int], peak_bytes: Sequence[int]) -> str:
    """Return a table with one row per stage.

    Args:
        stages: The stages.
        program: The program that runs. The title names it.
        in_flight: The most microbatches in flight on each stage under the program.
        peak_bytes: Peak bytes of activations on each stage's rank under the program.
    """
    title = f"{len(stages)} stages, {program.microbatches} microbatches, plan {program.name}; per microbatch"
    if any(spec.lossy_bf16 for stage in stages for spec in stage.outputs):
        title += "; messages are rounded to bfloat16"
    table = Table(title=title, title_justify="left")
    for heading in (
        "stage",
        "parameters",
        "FLOPs F",
        "I",
        "W",
        "kept F→I",
        "kept I→W",
        "sends forward",
        "backward",
        "in flight",
        "peak",
    ):
        table.add_column(heading, justify="right")
    for stage, count, peak in zip(stages, in_flight, peak_bytes, strict=True):
        sizes = (stage.kept_after_forward, stage.kept_after_input_grad, stage.output_bytes, stage.grad_input_bytes)
        table.add_row(
            str(stage.index),
            _bytes(stage.parameter_bytes),
            _short(stage.flops.forward),
            _short(stage.flops.input_grad),
            _short(stage.flops.weight_grad),
            *map(_bytes, sizes),
            str(count),
            _bytes(peak),
        )
    console = Console(file=StringIO(), width=120)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def _bytes(number: int) -> str:
    return f"{_short(number)}B" if number >= 1000 else f"{number} B"


def _short(number: float) -> str:
    """Return three digits and a decimal prefix: 1234567 is 1.23 M."""
    power = 0
    while abs(number) >= 999.5 and power < len(_UNITS) - 1:
        number /= 1000
        power += 1
    return f"{number:.3g} {_UNITS[power]}".strip()
