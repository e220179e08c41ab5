"""Starts the recorder with the sinks that the user's options request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from adaptra.errors import MissingExtraError
from adaptra.runtime.control.plans.events import ControlEvent
from adaptra.runtime.telemetry.handlers import EventHandler, RecordHandler
from adaptra.runtime.telemetry.log import FileSink, LogSink
from adaptra.runtime.telemetry.options import Telemetry
from adaptra.runtime.telemetry.prometheus import PrometheusSink
from adaptra.runtime.telemetry.recorder import Recorder, Sink
from adaptra.runtime.telemetry.tensorboard import TensorBoardSink


def start_recorder(
    telemetry: Telemetry, on_event: Callable[[ControlEvent], object] | None, ranks: Sequence[int], job_rank: int
) -> Recorder:
    """Open the requested sinks and start a recorder.

    Args:
        telemetry: The user's options, with the folders of :func:`of_replica`.
        on_event: The user's function for the controller's events.
        ranks: The pipeline's ranks that this process runs.
        job_rank: The job's rank of the first of them, which decides the port.

    Raises:
        OptionError: A folder can't be written, the port is taken, or there is no tracer provider.
        MissingExtraError: A sink's package is not installed; says what to install.
    """
    sinks: list[Sink] = [LogSink()]
    with ExitStack() as opened:

        def add(sink: Sink) -> None:
            sinks.append(sink)
            opened.callback(sink.close)

        if telemetry.metrics_port is not None:
            add(PrometheusSink(telemetry.metrics_address, telemetry.metrics_port + job_rank))
        if telemetry.folder is not None:
            add(FileSink(Path(telemetry.folder), ranks))
        if telemetry.tensorboard is not None:
            add(TensorBoardSink(telemetry.tensorboard, ranks))
        if telemetry.otel is not False:
            add(_span_sink(telemetry.otel))
        opened.pop_all()
    if telemetry.on_record is not None:
        sinks.append(RecordHandler(telemetry.on_record))
    if on_event is not None:
        sinks.append(EventHandler(on_event))
    return Recorder(sinks)


def of_replica(telemetry: Telemetry, replica: int) -> Telemetry:
    """Return the options for one of several data-parallel replicas, which have folders of their own."""

    def own(folder: str | Path) -> Path:
        return Path(folder) / f"replica-{replica}"

    board = telemetry.tensorboard
    return replace(
        telemetry,
        folder=None if telemetry.folder is None else own(telemetry.folder),
        tensorboard=own(board) if isinstance(board, str | Path) else board,
    )


def _span_sink(provider: object) -> Sink:
    try:
        from adaptra.runtime.telemetry.otel import SpanSink
    except ImportError as error:
        raise MissingExtraError("traces need opentelemetry-sdk: pip install 'adaptra[otel]'") from error
    return SpanSink(provider)
