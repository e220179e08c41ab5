"""What telemetry costs a step: a file, metrics, scalars, spans and a user's function, which all get every step.

The first rows take what a rank measured in a real step and record it many times. They show how long the thread of the step is
delayed each time, and how much processor time telemetry's own thread then needs. That of spans alone has a row of its own, and
so has one step in a hundred, as a sampler chooses them. All stand beside their iteration. Spans go through the SDK's batches to
an exporter that drops them.
The other rows are four processes over gloo with two pipelines of the same model, one without sinks and one with all. Their
steps run in turn. They show the iteration with emulated devices, and the processor time of a step of small tensors, mean of
the ranks.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from _ranks import run_on_ranks, small_problem, timed_in_turn
from _table import Row, parser, print_rows
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

import adaptra
from adaptra.report import perfetto
from adaptra.runtime.telemetry.rank import RankTelemetry
from adaptra.runtime.telemetry.records import TimestampedRecord
from adaptra.runtime.telemetry.start import start_recorder

PORT = 9400


def everything(folder: Path) -> adaptra.Telemetry:
    """Every kind of sink."""
    board = folder / "scalars"
    return adaptra.Telemetry(folder=folder, metrics_port=PORT, tensorboard=board, otel=tracer_provider(), on_record=ignore)


def spans(folder: Path) -> adaptra.Telemetry:
    """Spans of every step, and nothing else."""
    return adaptra.Telemetry(otel=tracer_provider())


def sampled_spans(folder: Path) -> adaptra.Telemetry:
    """Spans of one step in a hundred."""
    return adaptra.Telemetry(otel=tracer_provider(0.01))


def tracer_provider(share: float = 1.0) -> TracerProvider:
    """A provider as users configure it, that samples a share of the traces."""
    provider = TracerProvider(sampler=TraceIdRatioBased(share))
    provider.add_span_processor(BatchSpanProcessor(Drop()))
    return provider


class Drop(SpanExporter):
    """An exporter that sends nothing."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Drop the spans."""
        return SpanExportResult.SUCCESS


def ignore(timestamped: TimestampedRecord) -> None:
    """A user's function that does nothing."""


def record_often(
    ranks: int, microbatches: int, times: int, telemetry_in: Callable[[Path], adaptra.Telemetry]
) -> tuple[float, float]:
    """Seconds per step on the step's thread, and of processor time on telemetry's, for what a rank with two edges measured."""
    problem = small_problem(ranks, microbatches)
    with adaptra.compile(**problem) as pipe, tempfile.TemporaryDirectory() as folder:
        pipe.step(*problem["example_inputs"])
        built = pipe._session
        assert built is not None
        worker = built.workers[1]
        records, plan = worker.monitor.kept[-1], pipe.plan
        measurement = worker.monitor.end_step(records.step, records.start, records.end)
        recorder = start_recorder(telemetry_in(Path(folder)), None, [worker.rank], 0)
        telemetry = RankTelemetry(worker.rank, "bench", recorder, worker._context.transport, None, perfetto.write)
        telemetry.started(plan)
        held: list[float] = []
        worked, mine = time.process_time(), time.thread_time()
        for step in range(times):
            of_step = replace(measurement, step=step), replace(records, step=step)
            begun = time.perf_counter()
            telemetry.begin_step(step, plan)
            telemetry.end_step(*of_step)
            held.append(time.perf_counter() - begun)
        mine = time.thread_time() - mine
        while recorder._thread.is_alive():  # closing waits for some seconds at most
            recorder.close()
        return median(held), (time.process_time() - worked - mine) / times


def measure(rank: int, ranks: int, microbatches: int, runs: int, emulated_runs: int, seconds: float) -> dict[str, Any]:
    """One rank: steps that are recorded and steps that are not, in turn."""
    problem = small_problem(ranks, microbatches)

    def pairs(count: int, **options: Any) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            common: dict[str, Any] = {"adapt": False, "schedule": "zb_h1", **options}
            loud = adaptra.compile(**problem, options=adaptra.Options(**common, telemetry=everything(Path(folder))))
            quiet = adaptra.compile(**problem, options=adaptra.Options(**common))
            with loud, quiet:
                return timed_in_turn((loud, quiet), problem["example_inputs"], count)

    device = adaptra.EmulatedDevice(seconds, seconds, seconds)
    return {"small": pairs(runs), "emulated": pairs(emulated_runs, emulate=device)}


def main() -> int:
    """Measure and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=16)
    arguments.add_argument("--times", type=int, default=2000, help="how often the record of a step is made")
    arguments.add_argument("--runs", type=int, default=60, help="paired steps of small tensors")
    arguments.add_argument("--emulated-runs", type=int, default=15)
    arguments.add_argument("--op-ms", type=float, default=20.0, help="duration of every emulated op, milliseconds")
    given = arguments.parse_args()
    each = [record_often(given.ranks, given.microbatches, given.times, one) for one in (everything, spans, sampled_spans)]
    held, worked = each[0]
    found = run_on_ranks(
        measure, given.ranks, given.ranks, given.microbatches, given.runs, given.emulated_runs, given.op_ms / 1e3
    )

    def of(name: str, side: int, clock: int) -> float:
        return median(pair[side][clock] for pair in found[name])

    iteration = of("emulated", 1, 0)
    rows = [
        Row("held up per step (beside: the iteration)", 1e6 * held, 1e6 * iteration, "µs", given.times),
        Row("telemetry's thread per step (beside: the iteration)", 1e6 * worked, 1e6 * iteration, "µs", given.times),
        Row("of spans alone", 1e6 * each[1][1], 1e6 * iteration, "µs", given.times),
        Row("of spans of one step in a hundred", 1e6 * each[2][1], 1e6 * iteration, "µs", given.times),
        Row("emulated iteration", 1e3 * of("emulated", 0, 0), 1e3 * iteration, "ms", given.emulated_runs),
        Row("processor time of a small step", 1e3 * of("small", 0, 1), 1e3 * of("small", 1, 1), "ms", given.runs),
    ]
    title = f"telemetry, {given.ranks} ranks, {given.microbatches} microbatches, ops of {given.op_ms:g} ms where emulated"
    print_rows(title, rows, baseline="telling nobody", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
