"""The user's options of telemetry: the receivers of a run's records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from adaptra.checks import is_whole
from adaptra.errors import OptionError
from adaptra.known_keywords import known_keywords
from adaptra.runtime.telemetry.records import TimestampedRecord
from adaptra.runtime.telemetry.tensorboard import ScalarWriter


class SpanProvider(Protocol):
    """The interface of a tracer provider; opentelemetry.sdk.trace.TracerProvider implements it."""

    def get_tracer(self, instrumenting_module_name: str, /) -> object:
        """Return the tracer of a module."""
        ...


@known_keywords
@dataclass(frozen=True, slots=True)
class Telemetry:
    """Receivers of a run's records, besides Python's logging, which always gets them: ``docs/telemetry.md``.

    Attributes:
        folder: The folder in which every rank appends its records to ``rank-R.jsonl``, which ``adaptra trace`` draws. When a
            step fails, the trace of the last steps is written there as well. It is made if it does not exist. Data-parallel
            replicas have folders in it.
        metrics_port: Rank R of the job serves metrics for Prometheus on this port + R; ranks that are threads of one process do
            so together. Needs the extra ``metrics``.
        metrics_address: The address of this host to serve them on; ``"0.0.0.0"`` for all of them.
        tensorboard: A folder, or the user's ``SummaryWriter``, for scalars. A folder needs the extra ``tensorboard``.
        on_record: Called with every record and its time, on a thread of telemetry's own. The first exception that it raises is
            logged.
        otel: True to send a trace of each step to the program's OpenTelemetry, or the user's ``TracerProvider`` for them. The
            ranks' spans join one trace. Needs the extra ``otel``.

    Raises:
        OptionError: An option is invalid; names it, the given value and the expected one.
    """

    folder: str | Path | None = None
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"
    tensorboard: ScalarWriter | str | Path | None = None
    on_record: Callable[[TimestampedRecord], object] | None = None
    otel: SpanProvider | bool = False

    def __post_init__(self) -> None:
        folder: Any = self.folder
        if folder is not None and not isinstance(folder, str | Path):
            raise OptionError(f"Telemetry: folder={folder!r}: expected a folder's name, or None")
        metrics_port: Any = self.metrics_port
        if metrics_port is not None and (not is_whole(metrics_port) or not 0 < metrics_port < 2**16):
            raise OptionError(f"Telemetry: metrics_port={metrics_port!r}: expected a port of 1..65535, or None")
        metrics_address: Any = self.metrics_address
        if not isinstance(metrics_address, str):
            raise OptionError(
                f"Telemetry: metrics_address={metrics_address!r}: expected an address of this host such as '127.0.0.1'"
            )
        tensorboard: Any = self.tensorboard
        if (
            tensorboard is not None
            and not isinstance(tensorboard, str | Path)
            and not callable(getattr(tensorboard, "add_scalar", None))
        ):
            raise OptionError(f"Telemetry: tensorboard={tensorboard!r}: expected a folder's name, a SummaryWriter, or None")
        on_record: Any = self.on_record
        if on_record is not None and not callable(on_record):
            raise OptionError(
                f"Telemetry: on_record={on_record!r}: expected a function that is called with each record, or None"
            )
        otel: Any = self.otel
        if not isinstance(otel, bool) and not callable(getattr(otel, "get_tracer", None)):
            raise OptionError(f"Telemetry: otel={otel!r}: expected True, False, or a TracerProvider of opentelemetry.sdk")
