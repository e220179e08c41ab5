"""The records of a run, and the line of JSON that each is written as: ``docs/formats.md`` has the format.

Every line stands for itself: it has adaptra's mark with the format's version, its time, and its rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from adaptra.checks import is_finite, is_whole
from adaptra.errors import ControlError
from adaptra.json_files import Fields
from adaptra.program.placement import stages_of
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.measuring.measurement import IF_MEASURED, StepMeasurement, choice_to_json, read_choice
from adaptra.runtime.measuring.reduces import StageReduce, StepReduces
from adaptra.runtime.measuring.step_norms import StepNorms
from adaptra.simulation.worker_steps import WorkerStep, worker_name

if TYPE_CHECKING:
    from adaptra.runtime.measuring.monitor import StepRecords

VERSION: Final = 4
"""The version of the lines' format."""

MARK: Final = "adaptra"
"""The field that marks a line as adaptra's; its value is the format's version."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A rank is ready for its first step.

    Attributes:
        rank: The rank, counted within its pipeline.
        run: A name that all ranks of one start of a job share, and no other start has.
        ranks: The number of ranks of the pipeline.
        microbatches: Microbatches per step.
        version: The first plan.
        program: That plan's name.
        predicted: The simulated seconds of its steps in a row, from estimated costs.
        bound: A lower bound of these seconds under any plan.
        replica: The replica of the pipeline, 0 if there is only one.
        placement: ``placement[stage]`` is the stage's rank; empty if not known.
    """

    rank: int
    run: str
    ranks: int
    microbatches: int
    version: int
    program: str
    predicted: float
    bound: float
    replica: int = 0
    placement: tuple[int, ...] = ()

    def name_of(self, worker: int) -> str:
        """Return the name of a worker of the job, such as ``1.2``."""
        replica, rank = divmod(worker, self.ranks)
        return worker_name(replica, stages_of(rank, self.placement) or (rank,))

    @property
    def worker(self) -> int:
        """The number of the rank in the job, whichever of the launcher's ranks it is."""
        return self.replica * self.ranks + self.rank

    def __str__(self) -> str:
        return f"run {self.run} of {self.ranks} ranks begins under plan {self.version}, {self.program}"


@dataclass(frozen=True, slots=True)
class StepTaken:
    """A rank has run a step.

    Attributes:
        measurement: The step's duration, the durations of the rank's ops, and the flights of the messages to it.
        nbytes: The bytes that arrived on each edge, in the order of ``measurement.edges``.
        version: The plan that it ran under.
        predicted: This rank's prediction of a step under that plan; seconds. That of the coordinator's rank is the best: it
            includes predictions of a changed cost model for a plan that is kept.
        work: What the worker did; None if not known.
        records: When its ops ran and its messages came. Lines have no room for them, so None in what was read from a file.
    """

    measurement: StepMeasurement
    nbytes: tuple[int, ...]
    version: int
    predicted: float
    work: WorkerStep | None = None
    records: StepRecords | None = field(default=None, compare=False, repr=False)

    @property
    def rank(self) -> int:
        """The rank that ran it."""
        return self.measurement.rank

    def __str__(self) -> str:
        milliseconds = f"{1e3 * self.measurement.seconds:.1f} ms, predicted {1e3 * self.predicted:.1f} ms"
        return f"step {self.measurement.step}: {milliseconds}, plan {self.version}"


@dataclass(frozen=True, slots=True)
class NormsTold:
    """The replicas have told each other the norms of a step's gradients of a rank's stages. The same on all replicas.

    Attributes:
        rank: The rank.
        step: The step.
        norms: The norms.
    """

    rank: int
    step: int
    norms: StepNorms

    def __str__(self) -> str:
        return f"step {self.step}: norms of {len(self.norms.samples)} gradients and of their mean"


@dataclass(frozen=True, slots=True)
class PathsChanged:
    """Since the last step, paths of the delegate failed on a directed edge of ranks, or its messages moved to another path.

    Attributes:
        rank: The rank that noticed: the edge's source or its destination.
        step: The last step it had run.
        source, destination: The edge.
        failures: The number of paths that were up and have failed.
        changes: The number of moves of messages to another path; only their source knows it.
    """

    rank: int
    step: int
    source: int
    destination: int
    failures: int
    changes: int

    def __str__(self) -> str:
        edge = f"edge {self.source}→{self.destination}"
        return f"step {self.step}: {edge}: paths failed: {self.failures}, moves to another path: {self.changes}"


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A rank can't continue.

    Attributes:
        rank: The rank.
        step: The step that it had begun or was about to begin.
        error: The error's class and text.
        trace: The file with the records of its last steps, or None.
    """

    rank: int
    step: int
    error: str
    trace: str | None

    def __str__(self) -> str:
        return f"step {self.step} failed: {self.error}" + ("" if self.trace is None else f"; its last steps: {self.trace}")


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A rank has closed after this number of steps."""

    rank: int
    steps: int

    def __str__(self) -> str:
        return f"closed after {self.steps} steps"


_EVENTS: Final = {RunStarted: "started", PathsChanged: "path", StepFailed: "failed", RunEnded: "ended"}

Record = RunStarted | StepTaken | StepReduces | NormsTold | ControlEvent | PathsChanged | StepFailed | RunEnded


@dataclass(frozen=True, slots=True)
class TimestampedRecord:
    """A record and its time, in seconds since 1970 by the clock of its rank's host."""

    time: float
    record: Record


def to_line(timestamped: TimestampedRecord) -> str:
    """Return the line of JSON, without its end; :func:`from_json` reads back an equal record."""
    event, fields = _to_json(timestamped.record)
    return json.dumps({MARK: VERSION, "time": timestamped.time, "event": event, **fields}, allow_nan=False)


def from_json(data: object, where: str) -> TimestampedRecord:
    """Read a line that was decoded from JSON.

    Args:
        data: The decoded line.
        where: The beginning of every error message, such as a file and the line's number.

    Raises:
        ControlError: It is not adaptra's, of another version, or a field is missing, unknown or invalid.
    """
    if not isinstance(data, Mapping) or MARK not in data:
        raise ControlError(f"{where}: not adaptra's: expected a JSON object with a field {MARK!r}")
    fields = Fields(dict(data), where)
    version = fields.raw(MARK)
    if version != VERSION:
        raise ControlError(f"{where}: version {version!r}: this adaptra reads version {VERSION}")
    timestamped = TimestampedRecord(fields.instant("time"), _read(fields, fields.text("event", at_most=32), where))
    fields.end()
    return timestamped


def _to_json(record: Record) -> tuple[str, dict[str, Any]]:
    match record:
        case ControlEvent():
            fields = record.to_json()
            return fields.pop("kind"), fields
        case StepTaken():
            taken = {"version": record.version, "predicted": record.predicted, "bytes": list(record.nbytes)}
            work = {} if record.work is None else {"work": work_to_json(record.work)}
            return "step", record.measurement.to_json() | taken | work
        case StepReduces():
            return "reduced", {"rank": record.rank, "step": record.step, "stages": list(map(_reduce_to_json, record.stages))}
        case NormsTold():
            return "norms", {"rank": record.rank, "step": record.step, **record.norms.to_json()}
        case RunStarted() | PathsChanged() | StepFailed() | RunEnded():
            return _EVENTS[type(record)], asdict(record)


def _read(fields: Fields, event: str, where: str) -> Record:
    match event:
        case "started":
            return RunStarted(
                rank=fields.whole("rank"),
                run=fields.text("run", at_most=64),
                ranks=fields.whole("ranks", at_least=1),
                microbatches=fields.whole("microbatches", at_least=1),
                version=fields.whole("version"),
                program=fields.text("program"),
                predicted=fields.number("predicted"),
                bound=fields.number("bound"),
                replica=fields.whole("replica"),
                placement=fields.wholes_or_none("placement") or (),
            )
        case "step" | "reduced" | "norms":
            return _read_of_step(event, fields, where)
        case "path":
            return PathsChanged(*map(fields.whole, ("rank", "step", "source", "destination", "failures", "changes")))
        case "failed":
            trace = fields.raw("trace")
            if trace is not None and not isinstance(trace, str):
                raise fields.refuse("trace", "the name of a file or null", trace)
            return StepFailed(fields.whole("rank"), fields.whole("step"), fields.text("error"), trace)
        case "ended":
            return RunEnded(fields.whole("rank"), fields.whole("steps"))
        case kind if kind in {one.value for one in EventKind}:
            return ControlEvent(
                kind=EventKind(kind),
                rank=fields.whole("rank"),
                step=fields.whole("step"),
                version=fields.whole("version"),
                text=fields.text("text"),
                predicted=fields.number_or_none("predicted"),
                predicted_before=fields.number_or_none("predicted_before"),
                in_flight=fields.wholes_or_none("in_flight"),
                memory=fields.wholes_or_none("memory"),
            )
        case _:
            known = ", ".join(
                ["started", "step", "reduced", "norms", "path", "failed", "ended", *(kind.value for kind in EventKind)]
            )
            raise fields.refuse("event", f"one of {known}", event)


def _reduce_to_json(reduce: StageReduce) -> dict[str, Any]:
    times = {"seconds": reduce.seconds, "hidden": reduce.hidden, "exposed": reduce.exposed}
    choice = {} if reduce.choice is None else {"choice": choice_to_json(reduce.choice)}
    return {"stages": list(reduce.stages), **times, "bytes": reduce.nbytes, **choice}


def _read_of_step(event: str, fields: Fields, where: str) -> StepTaken | StepReduces | NormsTold:
    if event == "step":
        return _read_step(fields, where)
    of_step = fields.whole("rank"), fields.whole("step")
    if event == "norms":
        return NormsTold(*of_step, StepNorms.of_fields(fields))
    return StepReduces(*of_step, tuple(map(_read_reduce, fields.objects("stages"))))


def _read_reduce(fields: Fields) -> StageReduce:
    stages = fields.wholes_or_none("stages")
    if not stages:
        raise fields.refuse("stages", "the numbers of a rank's stages", stages)
    times = fields.number("seconds"), fields.number_or_none("hidden"), fields.number_or_none("exposed")
    choice = None if (found := fields.raw("choice", None)) is None else read_choice(found)
    reduce = StageReduce(stages, *times, fields.whole("bytes"), choice)
    fields.end()
    return reduce


def _read_step(fields: Fields, where: str) -> StepTaken:
    names = ["rank", "step", "seconds", "stages", "edges", "pause"]
    try:
        raw = {name: fields.raw(name) for name in names}
        raw |= {name: value for name in IF_MEASURED if (value := fields.raw(name, None)) is not None}
        measurement = StepMeasurement.from_json(raw)
    except ControlError as error:
        raise ControlError(f"{where}: {error}") from None
    nbytes: list[int] = []
    for value in fields.items("bytes"):
        if not is_whole(value) or value < 0:
            raise fields.refuse("bytes", "whole numbers", value)
        nbytes.append(value)
    if len(nbytes) != len(measurement.edges):
        raise ControlError(f"{where}: bytes of {len(nbytes)} edges: expected one number for each of {len(measurement.edges)}")
    work = fields.raw("work", None)
    return StepTaken(
        measurement,
        tuple(nbytes),
        fields.whole("version"),
        fields.number("predicted"),
        None if work is None else _read_work(Fields(work, f"{where}: work")),
    )


def work_to_json(work: WorkerStep) -> dict[str, Any]:
    """Return the JSON object of what a worker did. REDUCE is in the measurement."""
    return {
        "worker": work.worker,
        "replica": work.replica,
        "stages": list(work.stages),
        "compute": work.compute,
        "per_microbatch": work.per_microbatch,
        "own": work.own,
        "taken": [list(pair) for pair in work.taken],
        "given": [list(pair) for pair in work.given],
        "waits": [list(pair) for pair in work.waits],
    }


def _read_work(fields: Fields) -> WorkerStep:
    stages = fields.wholes_or_none("stages")
    if not stages:
        raise fields.refuse("stages", "the numbers of a rank's stages", stages)
    work = WorkerStep(
        worker=fields.whole("worker"),
        replica=fields.whole("replica"),
        stages=stages,
        compute=fields.number("compute"),
        per_microbatch=fields.number_or_none("per_microbatch"),
        own=fields.whole("own"),
        taken=_read_counts(fields, "taken"),
        given=_read_counts(fields, "given"),
        waits=tuple(_read_pairs(fields, "waits")),
    )
    fields.end()
    return work


def _read_counts(fields: Fields, name: str) -> tuple[tuple[int, int], ...]:
    pairs = list(_read_pairs(fields, name))
    if not all(is_whole(number) for _, number in pairs):
        raise fields.refuse(name, "pairs of whole numbers", pairs)
    return tuple((one, int(number)) for one, number in pairs)


def _read_pairs(fields: Fields, name: str) -> Iterator[tuple[int, float]]:
    for pair in fields.items(name):
        match pair:
            case [int(one), int() | float() as number] if is_whole(one) and one >= 0 and is_finite(number) and number >= 0:
                yield one, number
            case _:
                raise fields.refuse(name, "pairs of a whole number and a number, both not negative", pair)
