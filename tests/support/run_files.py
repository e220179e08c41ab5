"""The files that a run leaves, written without running anything."""

from __future__ import annotations

from pathlib import Path

from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.measuring.measurement import EdgeEstimate, EdgeMeasurement, StageMeasurement, StepMeasurement
from adaptra.runtime.telemetry.log import FileSink
from adaptra.runtime.telemetry.records import PathsChanged, Record, RunEnded, RunStarted, StepTaken, TimestampedRecord


def step_taken(rank: int, step: int, seconds: float, flight: float, version: int = 0, predicted: float = 0.1) -> StepTaken:
    """What a rank measured, with one of its neighbours."""
    edge = EdgeMeasurement(rank - 1 if rank else 1, rank, 4, 0.0, EdgeEstimate(flight, None, 0.01))
    stage = StageMeasurement(rank, 0.01, 0.01, 0.01, None)
    return StepTaken(StepMeasurement(rank, step, seconds, (stage,), (edge,)), (64,), version, predicted)


def slow_from(step: int) -> float:
    return 0.05 if step >= 4 else 0.001


def records_of(rank: int, run: str = "run one", steps: int = 8, ranks: int = 2) -> list[Record]:
    """Of a run whose link turns slow at step 4 and that has another plan from step 6 on."""
    found: list[Record] = [RunStarted(rank, run, ranks, 4, 0, "1f1b", 0.1, 0.1)]
    for step in range(steps):
        version = 1 if step >= 6 else 0
        found.append(step_taken(rank, step, 0.1 + slow_from(step) * (1 - version / 2) + rank / 100, slow_from(step), version))
        if step == 5:
            if rank == 0:
                found.append(ControlEvent(EventKind.DETECTED, 0, 5, 0, "edge 0→1 slow: 50.0 ms (was 1.0 ms)"))
                found.append(ControlEvent(EventKind.AGREED, 0, 6, 1, "edge 0→1 slow", 0.1, 0.2))
            found.append(ControlEvent(EventKind.SWITCHED, rank, 6, 1, "edge 0→1 slow", 0.1))
            found.append(PathsChanged(rank, 5, 0, 1, 1, int(rank == 0)))
    return found


def write(folder: Path, rank: int, records: list[Record], begin: float = 100.0) -> Path:
    """Records as a rank writes them, a second apart; the file."""
    sink = FileSink(folder, [rank])
    for number, record in enumerate(records):
        sink.take(TimestampedRecord(begin + number, record))
    sink.close()
    return folder / f"rank-{rank}.jsonl"


def whole_run(folder: Path) -> None:
    """All files of a run of two ranks that was closed."""
    for rank in range(2):
        write(folder, rank, [*records_of(rank), RunEnded(rank, 8)])
