"""Metrics as TensorBoard's scalars, by torch's SummaryWriter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from adaptra.errors import MissingExtraError
from adaptra.runtime.control.plans.events import ControlEvent
from adaptra.runtime.measuring.reduces import StepReduces
from adaptra.runtime.telemetry.metrics import MetricValues, Sample
from adaptra.runtime.telemetry.records import (
    NormsTold,
    PathsChanged,
    Record,
    RunEnded,
    RunStarted,
    StepFailed,
    StepTaken,
    TimestampedRecord,
)


class ScalarWriter(Protocol):
    """The interface of a writer; torch.utils.tensorboard.SummaryWriter implements it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> object:
        """Write one number of one step."""
        ...

    def flush(self) -> object:
        """Write buffered data."""
        ...


class TensorBoardSink:
    """Writes every metric when it changes, under the tag ``name/label value, …``, such as ``step_seconds/rank 0, worker 1.0``.

    Args:
        writer: The user's writer, which stays open, or a folder, in which the ranks of this process get a writer.
        ranks: The ranks of this process.

    Raises:
        MissingExtraError: A folder is given and tensorboard is not installed.
    """

    follows_steps = True

    def __init__(self, writer: ScalarWriter | str | Path, ranks: Sequence[int]) -> None:
        self._board = MetricValues()
        self._owned = None
        if isinstance(writer, str | Path):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise MissingExtraError("scalars need tensorboard: pip install 'adaptra[tensorboard]'") from error
            name = "-".join(map(str, sorted({ranks[0], ranks[-1]})))
            self._owned = writer = SummaryWriter(str(Path(writer) / f"rank-{name}"))
        self._writer: ScalarWriter = writer

    def take(self, timestamped: TimestampedRecord) -> None:
        """See :meth:`.recorder.Sink.take`."""
        step = _step_of(timestamped.record)
        for sample in self._board.update(timestamped.record):
            self._writer.add_scalar(_tag(sample), sample.value, step, timestamped.time)

    def close(self) -> None:
        """Write buffered data; close the writer unless it is the user's."""
        self._writer.flush()
        if self._owned is not None:
            self._owned.close()

    def __str__(self) -> str:
        return "TensorBoard's scalars"


def _tag(sample: Sample) -> str:
    labels = zip(sample.metric.labels, sample.labels, strict=True)
    return f"{sample.metric.name}/" + ", ".join(f"{name} {value}" for name, value in labels if value)


def _step_of(record: Record) -> int:
    match record:
        case StepTaken():
            return record.measurement.step
        case StepReduces() | NormsTold() | ControlEvent() | PathsChanged() | StepFailed():
            return record.step
        case RunStarted():
            return 0
        case RunEnded():
            return record.steps
