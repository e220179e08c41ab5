"""Tables: work, memory and messages of each stage of a compiled pipeline, and what each worker of a job did in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from adaptra.simulation.timeline import Timeline
from adaptra.simulation.worker_steps import SLOW_PACE, WorkerStep, paces, worker_steps

if TYPE_CHECKING:
    from adaptra.graph import TrainStage
    from adaptra.program import Program
    from adaptra.simulation.cost import CostModel

_UNITS = ("", "k", "M", "G", "T", "P")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measured time of one step, and the size of its batch.

    Attributes:
        step: The step's number.
        seconds: How long the step took on the ranks of this process, without what the loop does between steps.
        samples: The rows of the batch of this replica.
        tokens: Its tokens: rows times length of the first two-dimensional input of whole numbers. None without such an input.
        counted_in: That input.
    """

    step: int
    seconds: float
    samples: int
    tokens: int | None = None
    counted_in: str | None = None

    @property
    def per_second(self) -> float:
        """Tokens per second, or samples per second if the batch has no tokens."""
        return (self.samples if self.tokens is None else self.tokens) / self.seconds

    @property
    def unit(self) -> str:
        """What :attr:`per_second` counts."""
        return "samples" if self.tokens is None else "tokens"

    def __str__(self) -> str:
        counted = "rows of the batch" if self.counted_in is None else f"rows × length of {self.counted_in}"
        return f"step {self.step}: {1e3 * self.seconds:.1f} ms, {self.per_second:,.0f} {self.unit}/s ({counted})"


PADDED: Final = "ops sleep, as Options(emulate=... or faults=...) asks"
"""What is said of measured times that are not those of this machine."""


def measured_lines(
    step: MeasuredStep | None, replicas: int, estimated: CostModel, measured: CostModel | None, *, padded: bool = False
) -> str:
    """Return the lines about what was measured, as they stand below the table of stages.

    Args:
        step: The last step; None if these stages have run none.
        replicas: The number of replicas. The batch is that of one.
        estimated: The costs before the first step.
        measured: The costs known now; None where they are not known. Equal costs of a stage are not measured yet.
        padded: Whether ops sleep, by ``Options(emulate=...)`` or a fault.
    """
    if step is None:
        return "no step of these stages measured yet\n"
    lines = [str(step) + (f", in one of {replicas} replicas" if replicas > 1 else "") + (f"; {PADDED}" if padded else "")]
    if measured is not None:
        before, now = (list(zip(one.forward, one.input_grad, one.weight_grad, strict=True)) for one in (estimated, measured))
        rows = [
            (str(stage), *(f"{1e3 * seconds:.3f}" for seconds in kinds))
            for stage, kinds in enumerate(now)
            if kinds != before[stage]
        ]
        if rows:
            lines += [
                f"measured per microbatch{', sleeping included' if padded else ''}:",
                *_aligned([("stage", "F ms", "I ms", "W ms"), *rows]),
            ]
    return "".join(f"{line}\n" for line in lines)


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
    return _text_of(table)


WORKER_COLUMNS: Final = ("worker", "compute ms", "pace", "takes", "gives", "REDUCE ms", "exposed", "waits for")
_ABSENT: Final = "-"


def worker_rows(steps: Sequence[WorkerStep], unit: float) -> list[tuple[str, ...]]:
    """Return the cells of :data:`WORKER_COLUMNS` of each worker.

    Args:
        steps: The workers' entries of one step.
        unit: Seconds per unit of their times.
    """
    names, relative = {one.worker: one.name for one in steps}, paces(steps)

    def name_of(worker: int) -> str:
        return names.get(worker, f"worker {worker}")

    def milliseconds(time: float | None) -> str:
        return _ABSENT if time is None else f"{1e3 * unit * time:.1f}"

    return [
        (
            one.name,
            milliseconds(one.compute),
            f"{relative[one.worker]:.2f}×" if one.worker in relative else _ABSENT,
            ", ".join(f"{number} of replica {home}" for home, number in one.taken) or _ABSENT,
            ", ".join(f"{number} to {name_of(other)}" for other, number in one.given) or _ABSENT,
            milliseconds(one.reduce),
            milliseconds(one.exposed),
            next((f"{name_of(other)}: {milliseconds(time)} ms" for other, time in one.waits), _ABSENT),
        )
        for one in steps
    ]


def is_slow(row: Sequence[str]) -> bool:
    """Return whether a row of :func:`worker_rows` is of a worker that is slower than the others of its stage."""
    pace = row[WORKER_COLUMNS.index("pace")]
    return pace != _ABSENT and float(pace.rstrip("×")) >= SLOW_PACE


def lines_of_workers(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the headings and the rows of :func:`worker_rows` as aligned lines of text."""
    return _aligned([WORKER_COLUMNS, *rows])


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]


def table_of_workers(rows: Sequence[Sequence[str]], title: str | None = None) -> Table:
    """Return the table of :func:`worker_rows`, in which slow workers stand out on terminals with colours."""
    table = Table(title=title, title_justify="left")
    for heading in WORKER_COLUMNS:
        is_text = heading in ("worker", "takes", "gives", "waits for")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        table.add_row(*row, style="bold magenta" if is_slow(row) else None)
    return table


def worker_table(timeline: Timeline) -> str:
    """Return a table with one row for each worker of a measured step.

    ``pace`` is how long a microbatch takes, as a multiple of what is usual for the others of the worker's stages. ``takes`` are
    microbatches of other replicas that it computes, and ``gives`` those of its own that others compute. ``waits for`` is the
    worker for whose messages its ops waited longest, with the time of all these waits.
    """
    return _text_of(table_of_workers(worker_rows(worker_steps(timeline), timeline.seconds_per_unit or 1e-3)))


def _text_of(table: Table) -> str:
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
