"""Records for functions of the user, for example to pass them to OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable

from adaptra.runtime.control.plans.events import ControlEvent
from adaptra.runtime.telemetry.records import TimestampedRecord


class RecordHandler:
    """Calls a function with every record."""

    follows_steps = True

    def __init__(self, function: Callable[[TimestampedRecord], object]) -> None:
        self._function = function

    def take(self, timestamped: TimestampedRecord) -> None:
        """See :meth:`.recorder.Sink.take`."""
        self._function(timestamped)

    def close(self) -> None:
        """Do nothing, because nothing was opened."""

    def __str__(self) -> str:
        return "Telemetry(on_record=...)"


class EventHandler:
    """Calls a function with the controller's events."""

    follows_steps = False

    def __init__(self, function: Callable[[ControlEvent], object]) -> None:
        self._function = function

    def take(self, timestamped: TimestampedRecord) -> None:
        """See :meth:`.recorder.Sink.take`."""
        if isinstance(timestamped.record, ControlEvent):
            self._function(timestamped.record)

    def close(self) -> None:
        """Do nothing, because nothing was opened."""

    def __str__(self) -> str:
        return "Options(on_event=...)"
