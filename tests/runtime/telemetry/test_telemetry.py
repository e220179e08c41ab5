"""Telemetry: what each record says as a line, as metrics and as scalars; that no sink can stop training."""

from __future__ import annotations

import json
import logging
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import EXAMPLES
from paths import DOCS
from processes import free_port, free_ports, run_processes

import adaptra
from adaptra.collectives.choice import SumWay
from adaptra.collectives.late_ranks import SumChoice
from adaptra.errors import OptionError
from adaptra.report import perfetto
from adaptra.report.run_records import load_run
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.measuring.measurement import (
    EdgeEstimate,
    EdgeMeasurement,
    ReduceTimes,
    StageMeasurement,
    Stalls,
    StepMeasurement,
)
from adaptra.runtime.measuring.reduces import StageReduce, StepReduces
from adaptra.runtime.telemetry.log import FileSink
from adaptra.runtime.telemetry.prometheus import PrometheusSink
from adaptra.runtime.telemetry.recorder import MOST_WAITING, Recorder
from adaptra.runtime.telemetry.records import (
    PathsChanged,
    Record,
    RunEnded,
    RunStarted,
    StepFailed,
    StepTaken,
    TimestampedRecord,
    from_json,
    to_line,
)
from adaptra.runtime.telemetry.tensorboard import TensorBoardSink
from adaptra.simulation.worker_steps import WorkerStep

ROWS, MICROBATCHES = 8, 4
CHOICE = SumChoice(SumWay("streamed", (0, 2), 12), (0.5, 0.0, 0.25, 0.125), (("streamed", 0.75), ("direct", 1.0)), 0.125)
EXAMPLE = EXAMPLES["gpt_tied"]


WORK = WorkerStep(4, 1, (1,), 0.25, 0.051, 2, ((0, 1),), ((1, 2),), ((5, 0.125), (0, 0.0625)))
"""What worker 1.1 did: it computed two microbatches of its own and one of replica 0, and gave two to worker 0.1."""


def step_taken(
    step: int, rank: int = 1, seconds: float = 0.5, reduce: ReduceTimes | None = None, work: WorkerStep | None = None
) -> StepTaken:
    stage = StageMeasurement(rank, 0.02, 0.021, 0.01, None)
    edges = (
        EdgeMeasurement(rank - 1, rank, 4, 0.25, EdgeEstimate(0.0625, 0.0125, 0.012)),
        EdgeMeasurement(rank + 1, rank, 4, 0.125, EdgeEstimate(0.001, None, None), Stalls(1, 2, 0.25)),
    )
    return StepTaken(StepMeasurement(rank, step, seconds, (stage,), edges, 0.015625, reduce), (4096, 2048), 1, 0.4375, work)


def records() -> list[Record]:
    """One of every kind, and two steps, of which the second has other replicas."""
    return [
        RunStarted(1, "0123456789ab", 3, 4, 0, "1f1b", 0.375, 0.25, 1, (0, 1, 2)),
        step_taken(0),
        ControlEvent(EventKind.DETECTED, 1, 0, 0, "edge 0→1 slow: 60.0 ms (was 1.0 ms)"),
        ControlEvent(EventKind.PROPOSED, 1, 0, 1, "edge 0→1 slow", 0.4375, 0.5),
        ControlEvent(EventKind.SWITCHED, 1, 1, 1, "edge 0→1 slow", 0.4375),
        step_taken(1, seconds=0.4375, reduce=ReduceTimes(0, 0.25, 0.0625, 1024), work=WORK),
        StepReduces(1, 0, (StageReduce((0,), 0.125, 0.0, 0.125, 512), StageReduce((1, 2), 0.25, 0.1875, 0.0625, 1024, CHOICE))),
        PathsChanged(1, 1, 0, 1, 1, 2),
        StepFailed(1, 2, "IndexError: out of range", "runs/1/rank-1.step-2.json"),
        RunEnded(1, 2),
    ]


def timestamped_records() -> list[TimestampedRecord]:
    return [TimestampedRecord(1_700_000_000.5 + number, record) for number, record in enumerate(records())]


# Lines


def test_every_record_is_the_line_it_was_and_is_read_back(golden: Callable[[str, str], None]) -> None:
    lines = [to_line(one) for one in timestamped_records()]
    golden("telemetry.jsonl", "\n".join(lines) + "\n")
    assert [from_json(json.loads(line), "here") for line in lines] == timestamped_records()


def test_every_event_and_field_of_a_line_is_documented() -> None:
    _, text = (DOCS / "formats.md").read_text().split("## Runs: `.jsonl`")
    rows = [row.split("|")[1:3] for row in text.splitlines() if row.startswith("| ")]
    events = {event: set(re.findall(r"`(\w+)`", fields)) for names, fields in rows for event in re.findall(r"\w+", names)}
    assert {kind.value for kind in EventKind} <= set(events)
    for one in timestamped_records():
        line = json.loads(to_line(one))
        inner = [field for name in ("edges", "stages") for each in line.get(name, ()) for field in each]
        inner += [*line.get("reduce", ()), *line.get("work", ())]
        assert set(line) - {"adaptra", "time", "event", "rank"} <= events[line["event"]]
        assert set(inner) <= events[line["event"]]


def test_what_a_step_only_says_where_there_is_something_to_say_is_read_back() -> None:
    taken = StepTaken(StepMeasurement(1, 7, 0.5, (), (), has_met=True, update=0.125), (), 1, 0.25)
    line = json.loads(to_line(TimestampedRecord(1.0, taken)))
    assert {"has_met", "update"} <= line.keys() and "reduce" not in line
    assert from_json(line, "here") == TimestampedRecord(1.0, taken)


def test_every_kind_of_event_is_read_back() -> None:
    for kind in EventKind:
        one = TimestampedRecord(1.0, ControlEvent(kind, 0, 3, 1, "text", 0.5, None))
        assert from_json(json.loads(to_line(one)), "here") == one


def test_logging_gets_the_same_lines_and_others_in_the_same_form() -> None:
    """A handler of the user's with adaptra's formatter, on the logger ``adaptra``."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler, logger = Collect(), logging.getLogger("adaptra")
    handler.setFormatter(adaptra.JsonFormatter())
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        train(2)
        logging.getLogger("adaptra.test").warning("that is %s", "odd")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    found = [json.loads(line) for line in lines]
    assert {one["adaptra"] for one in found} == {4}
    steps = [from_json(one, "log").record for one in found if one["event"] == "step"]
    assert sorted((one.rank, one.measurement.step) for one in steps if isinstance(one, StepTaken)) == [
        (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip
    assert found[-1] == found[-1] | {"event": "log", "level": "WARNING", "logger": "adaptra.test", "text": "that is odd"}


def test_a_file_takes_no_second_run_at_a_time_and_any_later_one(tmp_path: Path) -> None:
    first = FileSink(tmp_path, [0])
    with pytest.raises(OptionError, match="another run is writing there"):
        FileSink(tmp_path, [0])
    first.take(TimestampedRecord(1.0, RunEnded(0, 0)))
    first.close()
    (tmp_path / "rank-0.jsonl").open("a").write('{"adaptra": 4, "ti')
    second = FileSink(tmp_path, [0])
    second.take(TimestampedRecord(2.0, RunEnded(0, 0)))
    second.close()
    lines = (tmp_path / "rank-0.jsonl").read_text().splitlines()
    assert [lines[0], lines[2]] == [
        to_line(TimestampedRecord(1.0, RunEnded(0, 0))),
        to_line(TimestampedRecord(2.0, RunEnded(0, 0))),
    ]


# Prometheus


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_the_metrics_are_the_text_they_were_and_closing_frees_the_port(golden: Callable[[str, str], None]) -> None:
    port = free_port()
    sink = PrometheusSink("127.0.0.1", port)
    for one in timestamped_records():
        sink.take(one)
    golden("metrics.txt", scrape(port))
    with pytest.raises(OptionError, match=f"metrics on 127.0.0.1:{port}: .*in use"):
        PrometheusSink("127.0.0.1", port)
    sink.close()
    with pytest.raises(urllib.error.URLError):
        scrape(port)
    again = PrometheusSink("127.0.0.1", port)
    assert 'adaptra_steps_total{rank="1"' not in scrape(port)
    again.close()


# TensorBoard


def test_tensorboard_reads_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path, [1])
    for one in timestamped_records():
        sink.take(one)
    sink.close()
    found = EventAccumulator(str(tmp_path / "rank-1"))
    found.Reload()

    def scalars(tag: str) -> list[tuple[int, float]]:
        return [(scalar.step, scalar.value) for scalar in found.Scalars(tag)]

    assert scalars("step_seconds/rank 1, worker 1.1") == [(0, 0.5), (1, 0.4375)]
    assert scalars("edge_bytes/rank 1, worker 1.1, edge 0>1") == [(0, 4096.0), (1, 8192.0)]
    assert dict(scalars("edge_latency_seconds/rank 1, worker 1.1, edge 0>1")) == pytest.approx({0: 0.05, 1: 0.05})
    assert scalars("reduce_seconds/rank 1, worker 1.1") == [(1, 0.25)]
    assert scalars("reduce_exposed_seconds/rank 1, worker 1.1, stage 1,2") == [(0, 0.0625)]
    assert scalars("worker_waiting_seconds/rank 1, worker 1.1, for 1.2") == [(1, 0.125)]
    assert scalars("worker_waiting_seconds/rank 1, worker 1.1, for 0.0") == [(1, 0.0625)]
    assert scalars("given_microbatches/rank 1, worker 1.1") == [(1, 2.0)]
    assert scalars("switches/rank 1, worker 1.1") == [(0, 0.0), (1, 1.0)]


def test_a_writer_of_the_users_is_written_to_and_stays_open() -> None:
    calls: list[tuple[Any, ...]] = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> None:
            calls.append((tag, scalar_value, global_step, walltime))

        def flush(self) -> None:
            calls.append(("flush",))

    sink = TensorBoardSink(Writer(), [1])
    sink.take(TimestampedRecord(7.0, step_taken(3)))
    sink.close()
    assert ("step_seconds/rank 1", 0.5, 3, 7.0) in calls
    assert calls[-1] == ("flush",)


# No sink stops training


class Collected:
    """A sink that keeps the records that it takes, once it is let."""

    follows_steps = True

    def __init__(self) -> None:
        self.taken: list[TimestampedRecord] = []
        self.may = threading.Event()

    def take(self, timestamped: TimestampedRecord) -> None:
        self.may.wait(100)
        self.taken.append(timestamped)

    def close(self) -> None:
        pass


def test_what_finds_no_room_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    sink = Collected()
    recorder = Recorder([sink])
    for number in range(MOST_WAITING + 20):
        recorder.record(lambda number=number: (RunEnded(0, number),))
    sink.may.set()
    recorder.close()
    # One may have been with the sink already, so that there was room for another.
    assert MOST_WAITING <= len(sink.taken) <= MOST_WAITING + 1
    assert [one.record for one in sink.taken] == [RunEnded(0, number) for number in range(len(sink.taken))]
    assert f"{MOST_WAITING + 20 - len(sink.taken)} records were dropped" in caplog.text


def train(steps: int, stages: int = 2, **options: Any) -> None:
    args, _, targets = EXAMPLE.rows(ROWS, seed=0)
    with adaptra.compile(
        EXAMPLE.make(),
        stages=stages,
        microbatches=MICROBATCHES,
        example_inputs=(args, targets),
        loss=EXAMPLE.loss,
        options=adaptra.Options(**options),
    ) as pipe:
        for _ in range(steps):
            pipe.step(args, targets)


def test_what_a_users_function_raises_is_logged_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[object] = []

    def broken(what: object) -> None:
        seen.append(what)
        raise KeyError("a mistake of the user's")

    train(20, on_event=broken, telemetry=adaptra.Telemetry(on_record=broken))  # on a busy host the first event comes late
    kinds = {type(one.record) for one in seen if isinstance(one, TimestampedRecord)}
    assert {RunStarted, StepTaken, ControlEvent, RunEnded} <= kinds
    assert any(isinstance(one, ControlEvent) for one in seen)
    logged = [record.getMessage() for record in caplog.records if "failed; training goes on" in record.getMessage()]
    assert sorted(line.split(" failed")[0] for line in logged) == [
        "telemetry: Options(on_event=...)", "telemetry: Telemetry(on_record=...)",
    ]  # fmt: skip


# The last steps after an error


def bad_tokens(at: int) -> tuple[Any, Any]:
    """A batch whose microbatch ``at`` has a token that the embedding of stage 0 does not have."""
    (tokens,), _, targets = EXAMPLE.rows(ROWS, seed=1)
    tokens[at * ROWS // MICROBATCHES, 0] = 999
    return tokens, targets


def failing_run(folder: Path, steps: int) -> Exception:
    """Train for some steps and fail in the next one, at microbatch 2; the error."""
    args, _, targets = EXAMPLE.rows(ROWS, seed=0)
    pipe = adaptra.compile(
        EXAMPLE.make(),
        stages=2,
        microbatches=MICROBATCHES,
        example_inputs=(args, targets),
        loss=EXAMPLE.loss,
        options=adaptra.Options(schedule="gpipe", adapt=False, telemetry=adaptra.Telemetry(folder=folder)),
    )
    for _ in range(steps):
        pipe.step(args, targets)
    with pytest.raises(IndexError) as caught:
        pipe.step(*bad_tokens(2))
    pipe.close()
    return caught.value


def test_after_an_error_the_last_steps_are_where_it_says(tmp_path: Path) -> None:
    error = failing_run(tmp_path, 12)
    path = tmp_path / "rank-0.step-12.json"
    assert f"the last steps of rank 0 are in {path}; adaptra trace draws them" in error.__notes__
    runs = perfetto.load_all(path)
    assert [title for title, _ in runs[:2]] == ["rank 0, step 4, plan 0", "rank 0, step 5, plan 0"]
    assert len(runs) == 9, "the last eight steps and the broken one: memory is bounded"
    title, broken = runs[-1]
    assert title == "rank 0, step 12, plan 0, broken off"
    assert [str(interval.op) for interval in broken] == ["0F0", "0F1"]
    assert len(perfetto.load_all(tmp_path / "rank-1.step-12.json")[0][1].messages) == MICROBATCHES
    failures = [one for one in load_run(tmp_path).happenings if one.kind == "failed"]
    assert {one.step for one in failures} == {12}
    assert any("IndexError" in one.text and str(path) in one.text for one in failures)


def test_an_error_in_the_first_step_leaves_what_ran(tmp_path: Path) -> None:
    failing_run(tmp_path, 0)
    ((title, timeline),) = perfetto.load_all(tmp_path / "rank-0.step-0.json")
    assert title == "rank 0, step 0, plan 0, broken off"
    assert len(timeline.ops[0]) == 2


def test_records_that_cannot_be_written_hide_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "rank-0.step-1.json").mkdir()
    error = failing_run(folder, 1)
    assert not any("last steps of rank 0" in note for note in error.__notes__)


# Two processes


def scraped_run(rank: int, folder: str, port: int) -> dict[str, Any]:
    """Trains, looks at its own metrics in the middle of the run, then fails on rank 0."""
    torch.distributed.init_process_group("gloo")
    seen = threading.Condition()
    steps: list[int] = []

    def on_record(one: TimestampedRecord) -> None:
        if isinstance(one.record, StepTaken):
            with seen:
                steps.append(one.record.measurement.step)
                seen.notify_all()

    example = EXAMPLES["gpt_tied"]
    args, _, targets = example.rows(ROWS, seed=0)
    telemetry = adaptra.Telemetry(folder=folder, metrics_port=port, on_record=on_record)
    pipe = adaptra.compile(
        example.make(),
        stages=2,
        microbatches=MICROBATCHES,
        example_inputs=(args, targets),
        loss=example.loss,
        options=adaptra.Options(telemetry=telemetry),
    )
    for _ in range(3):
        pipe.step(args, targets)
    # Handlers take a record after the metrics, so what they know of can be scraped.
    with seen:
        assert seen.wait_for(lambda: len(steps) == 3, 30)
    text = scrape(port + rank)
    with pytest.raises(Exception) as caught:
        pipe.step(*bad_tokens(1))
    pipe.close()
    torch.distributed.destroy_process_group()
    PrometheusSink("127.0.0.1", port + rank).close()
    return {"text": text, "error": type(caught.value).__name__, "notes": caught.value.__notes__}


@pytest.mark.processes
def test_two_ranks_over_gloo_are_scraped_and_leave_their_last_steps(tmp_path: Path) -> None:
    found = run_processes(scraped_run, 2, str(tmp_path), free_ports(2))
    for rank, (edge, one) in enumerate(zip(("1>0", "0>1"), found, strict=True)):
        labels = f'rank="{rank}",worker="0.{rank}"'
        assert f"adaptra_steps_total{{{labels}}} 3.0\n" in one["text"]
        assert f'adaptra_edge_messages_total{{edge="{edge}",{labels}}} {3.0 * MICROBATCHES}\n' in one["text"]
        assert f'adaptra_worker_waiting_seconds_total{{for="0.{1 - rank}",{labels}}}' in one["text"]
        assert f'rank="{1 - rank}"' not in one["text"]
        path = tmp_path / f"rank-{rank}.step-3.json"
        assert f"the last steps of rank {rank} are in {path}; adaptra trace draws them" in one["notes"]
        assert [title for title, _ in perfetto.load_all(path)][:3] == [f"rank {rank}, step {k}, plan 0" for k in range(3)]
    assert [one["error"] for one in found] == ["IndexError", "PeerLostError"]
    run = load_run(tmp_path)
    assert [step.step for step in run.steps] == [0, 1, 2]
    assert run.notes == ()
    assert {one.rank for one in run.happenings if one.kind == "failed"} == {0, 1}
