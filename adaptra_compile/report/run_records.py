"""A run read from the files that its ranks wrote, of one pipeline or of a job's replicas. ``adaptra trace FOLDER`` prints and
draws it.

The files of a failed run are readable too. The last line of a killed rank may be incomplete, which is noted but not an error. A
folder may contain several consecutive starts of a run. The last one counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Final

from adaptra.errors import ControlError, ReportError
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.measuring.measurement import choice_to_json
from adaptra.runtime.measuring.reduces import StepReduces, usual_reduces
from adaptra.runtime.telemetry.records import (
    NormsTold,
    PathsChanged,
    RunEnded,
    RunStarted,
    StepFailed,
    StepTaken,
    TimestampedRecord,
    from_json,
    work_to_json,
)
from adaptra.simulation.worker_steps import WorkerStep, usual_step

_FILES: Final = "rank-*.jsonl"
_USUAL_STEPS: Final = 5
"""The number of last steps from which the usual work of workers is taken."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of all ranks.

    Attributes:
        step: The number of the step.
        seconds: Seconds of the slowest rank.
        predicted: Seconds predicted by simulation of the step's plan.
        version: Version of the step's plan.
    """

    step: int
    seconds: float
    predicted: float
    version: int


@dataclass(frozen=True, slots=True)
class Happening:
    """An event other than a step: ``kind`` is one word, ``text`` one line for people."""

    step: int
    rank: int
    kind: str
    text: str


@dataclass(frozen=True)
class Run:
    """The records of a pipeline's ranks in its last run. With several replicas there is one such run for each.

    Attributes:
        folder: The folder of the files. Of the first of several replicas it is that of the job.
        started: The last start record; a run goes on by another one where its layout has changed.
        records: The records of each rank in order; empty for a rank without a file.
        cut_off: The files whose last line is incomplete.
        earlier: The number of earlier runs in the folder.
        peers: The runs of the job's other replicas, if this one was read as the job's first.
    """

    folder: Path
    started: RunStarted
    records: tuple[tuple[TimestampedRecord, ...], ...]
    cut_off: tuple[Path, ...]
    earlier: int
    peers: tuple[Run, ...] = ()

    @property
    def replicas(self) -> tuple[Run, ...]:
        """The runs of all replicas of the job, this one first."""
        return (self, *self.peers)

    @cached_property
    def steps(self) -> tuple[RecordedStep, ...]:
        """Return the steps in order, each of all replicas. The predictions are rank 0's, since it coordinates."""
        by_step: dict[int, list[StepTaken]] = {}
        for timestamped in self._all():
            if isinstance(timestamped.record, StepTaken):
                by_step.setdefault(timestamped.record.measurement.step, []).append(timestamped.record)
        return tuple(_step(number, ranks) for number, ranks in sorted(by_step.items()))

    @cached_property
    def flights(self) -> dict[tuple[int, int], tuple[tuple[int, float], ...]]:
        """Return, for every directed edge, pairs of a step and the seconds of a message that did not queue.

        Those of other replicas are left out; see :attr:`named_flights`.
        """
        by_edge: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for timestamped in self._own():
            if isinstance(timestamped.record, StepTaken):
                for edge in timestamped.record.measurement.edges:
                    flights = by_edge.setdefault((edge.source, edge.destination), [])
                    flights.append((timestamped.record.measurement.step, edge.estimate.flight))
        return {edge: tuple(flights) for edge, flights in sorted(by_edge.items())}

    @cached_property
    def named_flights(self) -> dict[tuple[str, str], tuple[tuple[int, float], ...]]:
        """Return the flights of all replicas by the names of the stages, or with several replicas of the workers."""
        named: dict[tuple[str, str], tuple[tuple[int, float], ...]] = {}
        for run in self.replicas:
            place = f"{run.started.replica}." if self.peers else ""
            named |= {(f"{place}{source}", f"{place}{end}"): one for (source, end), one in run.flights.items()}
        return named

    @cached_property
    def works(self) -> dict[int, tuple[tuple[int, WorkerStep], ...]]:
        """Return, for every worker of the job, pairs of a step and what it did."""
        by_worker: dict[int, dict[int, WorkerStep]] = {}
        for timestamped in self._all():
            if isinstance(timestamped.record, StepTaken) and timestamped.record.work is not None:
                measured, work = timestamped.record.measurement, timestamped.record.work
                mine = by_worker.setdefault(work.worker, {})
                mine[measured.step] = work
                # A step tells of REDUCE of the one before.
                if (reduce := measured.reduce) is not None and reduce.step in mine:
                    mine[reduce.step] = replace(mine[reduce.step], reduce=reduce.seconds, exposed=reduce.exposed)
        return {worker: tuple(sorted(by_worker[worker].items())) for worker in sorted(by_worker)}

    @cached_property
    def usual_works(self) -> tuple[WorkerStep, ...]:
        """Return what each worker usually did in the last steps of the last plan."""
        if not self.steps:
            return ()
        version = self.steps[-1].version
        began = max((step for own in self.records for step in _steps_of(_since_start(own))[:1]), default=0)
        last = [one.step for one in self.steps if one.version == version and one.step >= began][-_USUAL_STEPS:]
        of_worker = [[work for step, work in works if step in last] for works in self.works.values()]
        return tuple(usual_step(mine) for mine in of_worker if mine)

    @cached_property
    def reduces(self) -> tuple[StepReduces, ...]:
        """Return REDUCE of each step that all ranks measured, in order of steps; nothing without other replicas.

        Those of other replicas' ranks are left out.
        """
        found = {one.record.step: one.record for one in self._own() if isinstance(one.record, StepReduces)}
        return tuple(found[step] for step in sorted(found))

    @cached_property
    def happenings(self) -> tuple[Happening, ...]:
        """Return the coordinator's events, the ranks' refusals, and all failures and changes, in order of steps."""
        happenings: list[tuple[float, Happening]] = []
        for run in self.replicas:
            place = f"replica {run.started.replica}: " if run is not self else ""
            found = ((one.time, happening) for one in run._own() if (happening := _happening(one)) is not None)
            happenings += [(time, replace(one, text=f"{place}{one.text}")) for time, one in found]
        return tuple(one for _, one in sorted(happenings, key=lambda pair: (pair[1].step, pair[0])))

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks without records."""
        return tuple(rank for rank, own in enumerate(self.records) if not own)

    @property
    def unended(self) -> tuple[int, ...]:
        """The ranks that neither closed nor failed: they are still running, or were killed."""
        ends = (RunEnded, StepFailed)
        return tuple(rank for rank, own in enumerate(self.records) if own and not _has(ends, _since_start(own)))

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on the records themselves, one sentence each."""
        notes = [f"{path.name}: the last line is cut off" for path in self.cut_off]
        if self.missing:
            notes.append(f"nothing from rank {_listed(self.missing)}")
        if self.unended:
            notes.append(f"rank {_listed(self.unended)} neither closed nor failed: still running, or killed")
        if self.earlier:
            notes.append(f"the folder holds {self.earlier} earlier runs, which are left out")
        notes += [f"replica {run.started.replica}: {note}" for run in self.peers for note in run.notes]
        return tuple(notes)

    @property
    def size(self) -> str:
        """The numbers of replicas, ranks, microbatches and steps as text."""
        ranks = f"{self.started.ranks} ranks"
        if self.peers:
            ranks = f"{len(self.replicas)} replicas of {ranks}"
        return f"{ranks}, {self.started.microbatches} microbatches, {len(self.steps)} steps"

    def to_json(self) -> dict[str, Any]:
        """Return the run as one JSON object, with times in seconds."""
        return {
            "run": self.started.run,
            "replicas": len(self.replicas),
            "ranks": self.started.ranks,
            "microbatches": self.started.microbatches,
            "notes": list(self.notes),
            "steps": [
                {"step": one.step, "seconds": one.seconds, "predicted": one.predicted, "version": one.version}
                for one in self.steps
            ],
            "edges": [
                {
                    **({"replica": run.started.replica} if self.peers else {}),
                    "source": source,
                    "destination": destination,
                    "flights": [list(flight) for flight in flights],
                }
                for run in self.replicas
                for (source, destination), flights in run.flights.items()
            ],
            "workers": [
                {"worker": works[-1][1].name, "steps": [{"step": step, **work_to_json(work)} for step, work in works]}
                for works in self.works.values()
            ],
            "reduces": [
                {
                    "step": one.step,
                    "stages": [
                        {
                            "stages": list(each.stages),
                            "seconds": each.seconds,
                            "hidden": each.hidden,
                            "exposed": each.exposed,
                            "bytes": each.nbytes,
                            **({} if each.choice is None else {"choice": choice_to_json(each.choice)}),
                        }
                        for each in one.stages
                    ],
                }
                for one in self.reduces
            ],
            "happenings": [{"step": one.step, "rank": one.rank, "kind": one.kind, "text": one.text} for one in self.happenings],
        }

    def _all(self) -> Iterable[TimestampedRecord]:
        return (one for run in self.replicas for one in run._own())

    def _own(self) -> Iterable[TimestampedRecord]:
        return (one for own in self.records for one in own)


def load_run(folder: str | Path) -> Run:
    """Read the last run in a folder of ``Options(telemetry=...)``. With several replicas it has a folder for each.

    Raises:
        ReportError: The folder has no records. Or a file can't be read, is not adaptra's, is of another version, or has an
            invalid line. The text names the file, the line and what was expected.
    """
    folder = Path(folder)
    paths = sorted(folder.glob(_FILES))
    numbers = [path.name.removeprefix("replica-") for path in folder.glob("replica-*") if list(path.glob(_FILES))]
    if not paths and (replicas := sorted(int(one) for one in numbers if one.isdecimal())):
        first, *others = (load_run(folder / f"replica-{replica}") for replica in replicas)
        return replace(first, folder=folder, peers=tuple(others))
    if not paths:
        inner = sorted(path.parent for path in folder.glob(f"*/{_FILES}"))
        hint = f"; perhaps {inner[0]}" if inner else ""
        raise ReportError(f"{folder}: no {_FILES}: expected the folder of a run, Telemetry(folder=...){hint}")
    starts: dict[int, list[list[TimestampedRecord]]] = {}
    cut_off: list[Path] = []
    for path in paths:
        records, is_cut = _read(path)
        if is_cut:
            cut_off.append(path)
        for timestamped in records:
            of_rank = starts.setdefault(timestamped.record.rank, [])
            if isinstance(timestamped.record, RunStarted) or not of_rank:
                of_rank.append([])
            of_rank[-1].append(timestamped)
    return _last_run(folder, starts, tuple(cut_off))


def _last_run(folder: Path, starts: dict[int, list[list[TimestampedRecord]]], cut_off: tuple[Path, ...]) -> Run:
    """Return the run of the last start, with what it was before changes of layout."""
    begun = [(records[0].time, records[0].record) for of_rank in starts.values() for records in of_rank]
    named = [(moment, record) for moment, record in begun if isinstance(record, RunStarted)]
    if not named:
        raise ReportError(f"{folder}: no rank tells of its start: expected records that begin with the event 'started'")
    _, last = max(named, key=lambda one: one[0])
    records = tuple(
        tuple(one for own in starts.get(rank, ()) if _is_of(own, last.run) for one in own) for rank in range(last.ranks)
    )
    return Run(folder, last, records, cut_off, len({record.run for _, record in named}) - 1)


def _since_start(records: Sequence[TimestampedRecord]) -> Sequence[TimestampedRecord]:
    """Return the records of a rank since its last start, of the run or after a change of layout."""
    starts = [index for index, one in enumerate(records) if isinstance(one.record, RunStarted)]
    return records[starts[-1] :] if starts else records


def _has(kinds: tuple[type, ...], records: Sequence[TimestampedRecord]) -> bool:
    return any(isinstance(one.record, kinds) for one in records)


def _steps_of(records: Sequence[TimestampedRecord]) -> list[int]:
    return [one.record.measurement.step for one in records if isinstance(one.record, StepTaken)]


def _is_of(records: list[TimestampedRecord], run: str) -> bool:
    first = records[0].record
    return isinstance(first, RunStarted) and first.run == run


def _read(path: Path) -> tuple[list[TimestampedRecord], bool]:
    """Return a file's records, and whether its last line is incomplete. Such a line before another start is ignored."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from error
    records: list[TimestampedRecord] = []
    broken: tuple[int, Exception] | None = None
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not records:
                raise ReportError(f"{path}:{number}: not JSON: {error}: expected a line of adaptra's telemetry") from None
            broken = broken or (number, error)
            continue
        try:
            timestamped = from_json(data, f"{path}:{number}")
        except ControlError as error:
            raise ReportError(str(error)) from None
        if broken is not None and not isinstance(timestamped.record, RunStarted):
            raise ReportError(f"{path}:{broken[0]}: not JSON: {broken[1]}: only a last line may be cut off")
        broken = None
        records.append(timestamped)
    return records, broken is not None


def _step(number: int, ranks: list[StepTaken]) -> RecordedStep:
    first = min(ranks, key=lambda record: record.rank)
    return RecordedStep(number, max(record.measurement.seconds for record in ranks), first.predicted, first.version)


def _happening(timestamped: TimestampedRecord) -> Happening | None:
    record = timestamped.record
    match record:
        case ControlEvent(kind=EventKind.CONFIRMED | EventKind.SWITCHED | EventKind.SHARED | EventKind.DETOURED):
            return None  # the same on every rank: the agreement's event reports it once
        case ControlEvent():
            return Happening(record.step, record.rank, record.kind.value, f"plan {record.version}: {record.text}")
        case PathsChanged():
            return Happening(record.step, record.rank, "path", str(record).partition(": ")[2])
        case StepFailed():
            where = "" if record.trace is None else f"; last steps in {record.trace}"
            return Happening(record.step, record.rank, "failed", f"rank {record.rank}: {record.error}{where}")
        case RunStarted() | StepTaken() | StepReduces() | NormsTold() | RunEnded():
            return None


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def summary(run: Run) -> str:
    """Return the run as text: one line per period of steps under one plan, and the events."""
    lines = [f"run {run.started.run}: {run.size}"]
    lines += [f"note: {note}" for note in run.notes]
    for version in sorted({step.version for step in run.steps}):
        steps = [step for step in run.steps if step.version == version]
        middle, predicted = median(step.seconds for step in steps), steps[-1].predicted
        lines.append(
            f"plan {version}: steps {steps[0].step} to {steps[-1].step}, median {1e3 * middle:.1f} ms, "
            f"predicted at the end {1e3 * predicted:.1f} ms"
        )
    for one in run.replicas:
        what = f"REDUCE of replica {one.started.replica}" if run.peers else "REDUCE"
        lines += [f"{what}, median of {len(one.reduces)} steps: {reduce}" for reduce in usual_reduces(one.reduces)]
    lines += [f"step {one.step}: {one.kind} {one.text}" for one in run.happenings]
    lines += [line for line, _ in worker_lines(run)]
    return "\n".join(lines) + "\n"


def worker_lines(run: Run) -> list[tuple[str, bool]]:
    """Return the table of a job's workers as lines, each with whether it is of a slow worker. One replica alone has none."""
    works = run.usual_works
    if not run.peers or not works:
        return []
    from adaptra.report.stage_table import is_slow, lines_of_workers, worker_rows

    rows = worker_rows(works, 1.0)
    return list(zip(lines_of_workers(rows), (False, *map(is_slow, rows)), strict=True))
