"""Traces for OpenTelemetry: what the SDK's own exporter gets of steps, and that all ranks' spans of a step are in one trace."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from models import EXAMPLES
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import StatusCode

import adaptra
from adaptra.errors import OptionError
from adaptra.program import Kind, Op
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.measuring.measurement import StepMeasurement
from adaptra.runtime.measuring.monitor import MessageRecord, OpRecord, ReduceRecord, StepRecords
from adaptra.runtime.telemetry.otel import SpanSink, ids_of
from adaptra.runtime.telemetry.records import PathsChanged, Record, RunStarted, StepFailed, StepTaken, TimestampedRecord
from adaptra.simulation.worker_steps import WorkerStep

ROWS, MICROBATCHES, STEPS = 8, 4, 3
RUN = "0123456789ab"


class Spans:
    """A tracer provider of the user's, and the spans that it has exported."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, resource=Resource({"service.name": "training"}))
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def all(self, name: str | None = None) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if name in (None, span.name)]

    def of_trace(self, identity: int) -> list[ReadableSpan]:
        return [span for span in self.all() if span.context is not None and span.context.trace_id == identity]


def of(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    value = span.attributes[name]
    return list(value) if isinstance(value, tuple) else value


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def lies_within(inner: ReadableSpan, outer: ReadableSpan) -> bool:
    assert inner.start_time and inner.end_time and outer.start_time and outer.end_time
    return outer.start_time <= inner.start_time <= inner.end_time <= outer.end_time


def train(steps: int, telemetry: adaptra.Telemetry) -> None:
    example = EXAMPLES["gpt_tied"]
    args, _, targets = example.rows(ROWS, seed=0)
    with adaptra.compile(
        example.make(),
        stages=2,
        microbatches=MICROBATCHES,
        example_inputs=(args, targets),
        loss=example.loss,
        options=adaptra.Options(schedule="zb_h1", adapt=False, telemetry=telemetry),
    ) as pipe:
        for _ in range(steps):
            pipe.step(args, targets)


# A pipeline of two stages


@pytest.fixture(scope="module")
def trained() -> Iterator[Spans]:
    """The spans of three steps of two ranks, after a look at their times."""
    spans = Spans()
    begun = time.time_ns()
    train(STEPS, adaptra.Telemetry(otel=spans.provider))
    ended = time.time_ns()
    for span in spans.all("step"):
        assert span.start_time and span.end_time
        assert begun < span.start_time < span.end_time < ended + 10**7, "the wall clock's, but for its own corrections"
    yield spans


def test_a_step_is_a_trace_with_a_span_of_each_rank(trained: Spans) -> None:
    runs = {str(of(span, "adaptra.run")) for span in trained.all("step")}
    assert len(runs) == 1
    (run,) = runs
    assert len({span.context.trace_id for span in trained.all() if span.context is not None}) == STEPS
    for step in range(STEPS):
        ids = ids_of(run, step)
        first, second = sorted(
            (span for span in trained.of_trace(ids.trace) if span.name == "step"),
            key=lambda span: str(of(span, "adaptra.rank")),
        )
        assert (span_id(first), first.parent) == (ids.root, None)
        assert parent_id(second) == ids.root != span_id(second)
        assert [of(span, "adaptra.worker") for span in (first, second)] == ["0.0", "0.1"]
        assert [of(span, "adaptra.stages") for span in (first, second)] == [[0], [1]]
        assert {of(span, "adaptra.step") for span in (first, second)} == {step}
        assert first.resource.attributes["service.name"] == "training"


def test_ops_and_messages_are_spans_within_their_ranks_step(trained: Spans) -> None:
    steps = {span_id(span): span for span in trained.all("step")}
    children = [span for span in trained.all() if span.name != "step"]
    each = STEPS * MICROBATCHES
    assert Counter(span.name for span in children) == {
        **dict.fromkeys(("0F", "0I", "0W", "1F", "1I", "1W"), each), "0SEND_F": each, "1SEND_B": each,
    }  # fmt: skip
    for span in children:
        assert span.parent is not None
        above = steps[span.parent.span_id]
        receiver = "0.0" if span.name == "1SEND_B" else "0.1" if span.name == "0SEND_F" else f"0.{span.name[0]}"
        assert of(above, "adaptra.worker") == receiver
        if "SEND" not in span.name:
            assert lies_within(span, above)
            assert of(span, "adaptra.op") == f"{span.name}{of(span, 'adaptra.microbatch')}"
    numbers = Counter((span.parent and span.parent.span_id, of(span, "adaptra.microbatch")) for span in trained.all("1F"))
    assert set(numbers.values()) == {1} and len(numbers) == each
    assert {of(span, "adaptra.edge") for span in trained.all("0SEND_F")} == {"0>1"}
    forward = {(span.context.trace_id, of(span, "adaptra.microbatch")): span for span in trained.all("1F") if span.context}
    for span in trained.all("0SEND_F"):
        assert span.context is not None and span.end_time
        used_by = forward[span.context.trace_id, of(span, "adaptra.microbatch")]
        assert used_by.start_time and span.end_time <= used_by.start_time, "a message has come before its op begins"


def test_the_programs_own_provider_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: spans.provider)
    train(1, adaptra.Telemetry(otel=True))
    assert len(spans.all("step")) == 2


def test_without_a_provider_it_is_refused() -> None:
    with pytest.raises(OptionError, match=r"otel=True: the tracer provider is a ProxyTracerProvider: expected"):
        train(1, adaptra.Telemetry(otel=True))


def test_other_tracers_of_the_same_name_keep_their_ids() -> None:
    """Two pipelines of one process have the same provider."""
    spans = Spans()
    first, second = (taken(spans, started(0)) for _ in range(2))
    user = spans.provider.get_tracer("adaptra")
    for number, sink in enumerate((first, second)):
        sink.take(TimestampedRecord(1.0, step_taken(0, number)))
        user.start_span("the user's").end()
    assert [span_id(span) for span in spans.all("step")] == [ids_of(RUN, 0).root, ids_of(RUN, 1).root]
    assert len({span.context.trace_id for span in spans.all() if span.context is not None}) == 4


def test_spans_draw_nothing_from_the_users_random_numbers() -> None:
    """They come on a thread beside training, which may shuffle its data by them, and capture watches for draws."""
    spans = Spans(ParentBased(TraceIdRatioBased(0.5)))
    before = random.getstate()
    for rank in range(2):
        taken(
            spans, started(rank), *(step_taken(rank, step) for step in range(8)), StepFailed(rank, 8, "IndexError: out", None)
        )
    assert spans.all()
    assert random.getstate() == before


# Ranks of several processes, each with a provider of its own


def started(rank: int, replica: int = 0) -> RunStarted:
    return RunStarted(rank, RUN, 2, 2, 0, "1f1b", 0.4, 0.3, replica, (0, 1))


def step_taken(rank: int, step: int, replica: int = 0) -> StepTaken:
    records = StepRecords(
        rank,
        step,
        10.0,
        11.0,
        (OpRecord(Op(rank, Kind.F, 1, replica=replica), 10.25, 10.5),),
        (MessageRecord(Kind.SEND_F, 0, 1, 1, 64, 10.3, 10.3, 10.125, 10.5),) if rank else (),
        ReduceRecord(10.75, 11.0, 512),
    )
    work = WorkerStep(2 * replica + rank, replica, (rank,), 0.25, 0.25, 1, (), (), ())
    return StepTaken(StepMeasurement(rank, step, 1.0, (), ()), (), 3, 0.5, work, records)


def taken(spans: Spans, *records: Record) -> SpanSink:
    sink = SpanSink(spans.provider)
    for number, record in enumerate(records):
        sink.take(TimestampedRecord(1_700_000_000.5 + number, record))
    return sink


def test_workers_of_all_replicas_join_the_first_ones_root() -> None:
    workers = [(rank, replica) for replica in range(2) for rank in range(2)]
    found = [Spans() for _ in workers]
    for spans, worker in zip(found, workers, strict=True):
        taken(spans, started(*worker), step_taken(worker[0], 7, worker[1]))
    ids = ids_of(RUN, 7)
    steps = [spans.all("step")[0] for spans in found]
    assert [parent_id(span) for span in steps] == [None, ids.root, ids.root, ids.root]
    assert {span.context.trace_id for spans in found for span in spans.all() if span.context is not None} == {ids.trace}
    assert [of(span, "adaptra.worker") for span in steps] == ["0.0", "0.1", "1.0", "1.1"]
    assert of(found[3].all("1F")[0], "adaptra.op") == "1:1F1"
    assert of(found[3].all("1F")[0], "adaptra.replica") == 1


def test_times_are_those_that_were_recorded() -> None:
    spans = Spans()
    taken(spans, started(1), step_taken(1, 0))
    (step,), (op,), (message,), (reduce,) = map(spans.all, ("step", "1F", "0SEND_F", "REDUCE"))
    assert step.start_time and step.end_time
    millisecond = 10**6
    assert step.end_time - step.start_time == 1000 * millisecond

    def since_begin(span: ReadableSpan) -> list[float]:
        assert span.start_time and span.end_time and step.start_time
        return [(at - step.start_time) / millisecond for at in (span.start_time, span.end_time)]

    assert since_begin(op) == [250, 500]
    assert since_begin(reduce) == [750, 1000]
    assert since_begin(message) == [125, 125], "clocks that disagree make no message of negative length"
    assert (of(message, "adaptra.bytes"), of(reduce, "adaptra.bytes")) == (64, 512)


@pytest.mark.parametrize("sampler", [TraceIdRatioBased(0.25), ParentBased(TraceIdRatioBased(0.25))], ids=["ratio", "parent"])
def test_a_sampler_keeps_or_leaves_a_step_on_all_ranks(sampler: Sampler) -> None:
    kept: list[set[object]] = []
    for rank in range(2):
        spans = Spans(sampler)
        taken(spans, started(rank), *(step_taken(rank, step) for step in range(200)))
        kept.append({of(span, "adaptra.step") for span in spans.all("step")})
        ops = spans.all(f"{rank}F")
        assert len(ops) == len(kept[-1]), "a span of a step has its ops, and one that is left out has none"
    assert kept[0] == kept[1]
    assert 25 < len(kept[0]) < 80


def test_a_sampler_that_drops_all_gets_no_span() -> None:
    spans = Spans(ParentBased(ALWAYS_OFF))
    for rank in range(2):
        taken(spans, started(rank), step_taken(rank, 0))
    assert not spans.all()


def test_events_come_with_the_next_step_and_only_once() -> None:
    spans = Spans()
    event = ControlEvent(EventKind.SWITCHED, 1, 0, 4, "edge 0→1 slow")
    taken(spans, started(1), event, PathsChanged(1, 0, 0, 1, 1, 2), step_taken(1, 0), step_taken(1, 1))
    first, second = spans.all("step")
    assert [one.name for one in first.events] == ["adaptra.switched", "adaptra.path"]
    assert dict(first.events[0].attributes or {}) == {"adaptra.text": "edge 0→1 slow", "adaptra.plan": 4}
    assert first.events[0].timestamp == 1_700_000_001_500_000_000
    assert not second.events


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_step_is_an_error_in_its_trace(rank: int) -> None:
    spans = Spans()
    taken(
        spans, started(rank), step_taken(rank, 0), StepFailed(rank, 1, "IndexError: out of range", "runs/1/rank-1.step-1.json")
    )
    failed = spans.all("step")[-1]
    assert failed.context is not None and failed.context.trace_id == ids_of(RUN, 1).trace
    assert parent_id(failed) == (None if rank == 0 else ids_of(RUN, 1).root)
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "IndexError: out of range")
    assert (of(failed, "error.type"), of(failed, "adaptra.trace")) == ("IndexError", "runs/1/rank-1.step-1.json")


def test_a_switched_off_sdk_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    spans = Spans()
    for rank in range(2):
        taken(spans, started(rank), step_taken(rank, 0), StepFailed(rank, 1, "IndexError: out", None)).close()
    assert not spans.all()
