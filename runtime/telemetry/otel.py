"""Traces for OpenTelemetry: one for each training step, which the spans of all ranks join.

The ranks send each other nothing for it. Each derives the ids of a step's trace and of its root from the run's name and the
step's number. The worker of the first stage of replica 0 makes the root, and the spans of other workers are its children.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Mapping
from random import Random
from typing import Any, Final, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from adaptra.errors import OptionError
from adaptra.runtime.control.plans.events import ControlEvent
from adaptra.runtime.measuring.monitor import StepRecords
from adaptra.runtime.measuring.reduces import StepReduces
from adaptra.runtime.telemetry.records import (
    NormsTold,
    PathsChanged,
    RunEnded,
    RunStarted,
    StepFailed,
    StepTaken,
    TimestampedRecord,
)

FLUSH_SECONDS: Final = 2.0
"""The longest time for which closing waits until the exporter has sent the last spans, seconds."""

_STEP: Final = "step"


class StepIds(NamedTuple):
    """The ids of a step's trace and of its root span."""

    trace: int
    root: int


def ids_of(run: str, step: int) -> StepIds:
    """Return the ids of a step, the same on all ranks of the run."""
    digest = hashlib.sha256(f"{run}/{step}".encode()).digest()
    return StepIds(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]))


class SpanSink:
    """Makes a span of each step of this process's ranks, with children for ops, messages and REDUCE.

    Args:
        provider: The user's tracer provider, which samples and exports; True for the program's own.

    Raises:
        OptionError: The provider is not that of OpenTelemetry's SDK, or the program has none.
    """

    follows_steps = True

    def __init__(self, provider: object) -> None:
        tracer_provider = trace.get_tracer_provider() if provider is True else provider
        if not isinstance(tracer_provider, TracerProvider):
            raise OptionError(
                f"Telemetry: otel={provider!r}: the tracer provider is a {type(tracer_provider).__name__}: expected a "
                "TracerProvider of opentelemetry.sdk, as opentelemetry.trace.set_tracer_provider or "
                "opentelemetry-instrument sets it"
            )
        self._provider = tracer_provider
        self._ids = _Ids()
        # A copy, because the provider gives the same tracer to all who ask under this name.
        tracer: Any = copy.copy(tracer_provider.get_tracer("adaptra"))
        tracer.id_generator = self._ids
        self._tracer: trace.Tracer = tracer
        self._started: dict[int, RunStarted] = {}
        self._events: dict[int, list[tuple[str, dict[str, Any], int]]] = {}

    def take(self, timestamped: TimestampedRecord) -> None:
        """See :meth:`.recorder.Sink.take`."""
        record, at = timestamped.record, _nanoseconds(timestamped.time)
        match record:
            case RunStarted():
                self._started[record.rank] = record
            case ControlEvent():
                self._keep(record.rank, record.kind.value, {"adaptra.text": record.text, "adaptra.plan": record.version}, at)
            case PathsChanged():
                self._keep(record.rank, "path", {"adaptra.text": str(record)}, at)
            case StepTaken() if record.records is not None:
                self._step(record, record.records)
            case StepFailed():
                self._failed(record, at)
            case StepTaken() | StepReduces() | NormsTold() | RunEnded():
                pass

    def close(self) -> None:
        """Have the exporter send what it holds. The provider is the user's and stays open."""
        self._provider.force_flush(round(1e3 * FLUSH_SECONDS))

    def __str__(self) -> str:
        return "OpenTelemetry's spans"

    def _keep(self, rank: int, name: str, attributes: dict[str, Any], at: int) -> None:
        """Keep an event for the rank's next span of a step."""
        self._events.setdefault(rank, []).append((f"adaptra.{name}", attributes, at))

    def _step(self, record: StepTaken, records: StepRecords) -> None:
        ahead = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return _nanoseconds(seconds) + ahead

        own: dict[str, Any] = {"adaptra.plan": record.version, "adaptra.predicted_seconds": record.predicted}
        if (work := record.work) is not None:
            own |= {"adaptra.worker": work.name, "adaptra.stages": work.stages, "adaptra.compute_seconds": work.compute}
        is_first = work is not None and work.replica == 0 and 0 in work.stages
        span = self._start(records.rank, records.step, own, at(records.start), is_first=is_first)
        if span.is_recording():
            within = trace.set_span_in_context(span, Context())

            def child(name: str, attributes: Mapping[str, Any], start: float, end: float) -> None:
                self._tracer.start_span(name, within, attributes=attributes, start_time=at(start)).end(at(end))

            # Without a replica an op is of that of the span above: replicas that run apart number theirs 0.
            is_shared = work is not None and bool(work.taken)
            for op, start, end in records.ops:
                of = {"adaptra.op": str(op), "adaptra.stage": op.stage, "adaptra.microbatch": op.microbatch}
                child(
                    f"{op.stage}{op.kind.value}",
                    of | ({"adaptra.replica": op.replica} if is_shared or op.replica else {}),
                    start,
                    end,
                )
            for message in records.messages:
                edge = f"{message.source}>{message.destination}"
                of = {"adaptra.edge": edge, "adaptra.microbatch": message.microbatch, "adaptra.bytes": message.nbytes}
                # Clocks of two hosts may disagree by more than a short flight.
                sent = min(message.sent_at, message.arrived_at)
                child(
                    f"{message.source}{message.kind.value}",
                    of | ({} if message.replica is None else {"adaptra.replica": message.replica}),
                    sent,
                    message.arrived_at,
                )
            if (reduce := records.reduce) is not None:
                child("REDUCE", {"adaptra.bytes": reduce.nbytes}, reduce.start, reduce.end)
        span.end(at(records.end))

    def _failed(self, record: StepFailed, at: int) -> None:
        """Make a span without a duration: when the step began is not in the record."""
        started = self._started[record.rank]
        is_first = started.replica == 0 and record.rank == started.placement[0]
        of = {"error.type": record.error.partition(":")[0]} | ({} if record.trace is None else {"adaptra.trace": record.trace})
        span = self._start(record.rank, record.step, of, at, is_first=is_first)
        span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(at)

    def _start(self, rank: int, step: int, attributes: Mapping[str, Any], at: int, *, is_first: bool) -> Span:
        """Begin a rank's span of a step: the root on the first worker, else a child of it. It takes the kept events."""
        started = self._started[rank]
        ids = ids_of(started.run, step)
        of = {"adaptra.run": started.run, "adaptra.step": step, "adaptra.rank": rank, "adaptra.replica": started.replica}
        of |= attributes
        if is_first:
            self._ids.next_root = ids
            span = self._tracer.start_span(_STEP, Context(), attributes=of, start_time=at)
            self._ids.next_root = None
        else:
            span = self._tracer.start_span(_STEP, self._under_root(ids), attributes=of, start_time=at)
        for name, of_event, moment in self._events.pop(rank, ()):
            span.add_event(name, of_event, moment)
        return span

    def _under_root(self, ids: StepIds) -> Context:
        """Return the context below the first worker's root. The sampler decides as it does there, from the trace's id."""
        sampled = self._provider.sampler.should_sample(Context(), ids.trace, _STEP, SpanKind.INTERNAL).decision.is_sampled()
        flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
        root = SpanContext(ids.trace, ids.root, is_remote=True, trace_flags=flags)
        return trace.set_span_in_context(NonRecordingSpan(root), Context())


class _Ids(IdGenerator):
    """Gives the next root the ids that are set for it, and other spans random ones.

    The SDK's own generator draws from Python's ``random``. That would change what the user draws from it.
    """

    def __init__(self) -> None:
        self._random = Random()
        self.next_root: StepIds | None = None

    def generate_trace_id(self) -> int:
        return self._random.getrandbits(128) if self.next_root is None else self.next_root.trace

    def generate_span_id(self) -> int:
        return self._random.getrandbits(64) if self.next_root is None else self.next_root.root


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
