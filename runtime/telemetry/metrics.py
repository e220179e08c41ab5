"""The metrics that Prometheus and TensorBoard show, and the samples of each record."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.measuring.reduces import StepReduces
from adaptra.runtime.telemetry.records import NormsTold, PathsChanged, Record, RunEnded, RunStarted, StepFailed, StepTaken
from adaptra.simulation.worker_steps import WorkerStep


@dataclass(frozen=True, slots=True)
class Metric:
    """One number per combination of labels.

    Attributes:
        name: The name with its unit. Prometheus adds the prefix ``adaptra_``, and ``_total`` to totals.
        help: The description.
        labels: The names of the labels. ``worker`` is ``REPLICA.STAGE``, such as ``1.2``. ``edge`` is ``1>2``, two stages.
        is_total: True if it only grows: a sample is then the amount added, else the present value.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ("rank", "worker")
    is_total: bool = False


_EDGE: Final = ("rank", "worker", "edge")

STEPS: Final = Metric("steps", "Steps that the rank has run.", is_total=True)
STEP: Final = Metric("step_seconds", "How long the last step took.")
PREDICTED: Final = Metric("predicted_step_seconds", "How long a step takes under the running plan by simulation.")
PLAN: Final = Metric("plan_version", "The version of the running plan.")
STAGE: Final = Metric(
    "stage_op_seconds", "Median duration of a stage's ops of one kind in the last step.", ("rank", "worker", "stage", "kind")
)
LATENCY: Final = Metric("edge_latency_seconds", "What messages took in the last step beyond the edge's occupancy.", _EDGE)
OCCUPANCY: Final = Metric(
    "edge_occupancy_seconds", "For how long a message kept the next one from departing; 0 where none queued.", _EDGE
)
WAITING: Final = Metric("edge_waiting_seconds", "How long the rank's ops have waited for messages.", _EDGE, is_total=True)
MESSAGES: Final = Metric("edge_messages", "Messages that have arrived.", _EDGE, is_total=True)
STALLS: Final = Metric("edge_stalls", "Messages that stalled, as those that are lost and sent again.", _EDGE, is_total=True)
BYTES: Final = Metric("edge_bytes", "Bytes that have arrived.", _EDGE, is_total=True)
REDUCE: Final = Metric("reduce_seconds", "How long the sum of gradients over the replicas took in the last step but one.")
REDUCE_BYTES: Final = Metric("reduce_bytes", "Bytes of gradients that were added over the replicas.", is_total=True)
HIDDEN: Final = Metric(
    "reduce_hidden_seconds",
    "The part of the last known sum over replicas that cost its rank nothing.",
    ("rank", "worker", "stage"),
)
EXPOSED: Final = Metric(
    "reduce_exposed_seconds",
    "The part of the last known sum over replicas that delayed its rank's next step.",
    ("rank", "worker", "stage"),
)
COMPUTE: Final = Metric("compute_seconds", "How long the worker computed in the last step.")
MICROBATCH: Final = Metric("microbatch_seconds", "How long F, I and W of one microbatch took the worker in the last step.")
TAKEN: Final = Metric("taken_microbatches", "Microbatches of other replicas that the worker computed in the last step.")
GIVEN: Final = Metric("given_microbatches", "Microbatches of its replica that others computed for the worker in the last step.")
WAITED: Final = Metric(
    "worker_waiting_seconds",
    "How long the worker has idled until messages of another worker came.",
    ("rank", "worker", "for"),
    is_total=True,
)
DETECTIONS: Final = Metric("detections", "Changes of the cost model that the coordinator detected.", is_total=True)
SWITCHES: Final = Metric("switches", "Plans that the rank has switched to.", is_total=True)
PATH_FAILURES: Final = Metric("path_failures", "Paths of the delegate that were up and failed.", _EDGE, is_total=True)
PATH_CHANGES: Final = Metric("path_changes", "Times that messages moved to another path.", _EDGE, is_total=True)
FAILURES: Final = Metric("failures", "1 once the rank can't go on.", is_total=True)

METRICS: Final = (
    STEPS, STEP, PREDICTED, PLAN, STAGE, LATENCY, OCCUPANCY, WAITING, MESSAGES, STALLS, BYTES, REDUCE, REDUCE_BYTES,
    HIDDEN, EXPOSED, COMPUTE, MICROBATCH, TAKEN, GIVEN, WAITED, DETECTIONS, SWITCHES, PATH_FAILURES, PATH_CHANGES, FAILURES,
)  # fmt: skip


class Sample(NamedTuple):
    """A metric's value for some labels, in the order of the metric's own."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


class MetricValues:
    """The present value of every metric. Any thread may read it."""

    def __init__(self) -> None:
        self._values: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._started: dict[int, RunStarted] = {}
        self._lock = threading.Lock()

    def update(self, record: Record) -> tuple[Sample, ...]:
        """Take a record's samples.

        Returns:
            The values that it has set, totals as a whole.
        """
        samples: list[Sample] = []
        if isinstance(record, RunStarted):
            self._started[record.rank] = record
        with self._lock:
            for metric, labels, value in samples_of(record, self._started.get(record.rank)):
                whole = value + self._values.get((metric, labels), 0.0) if metric.is_total else value
                self._values[metric, labels] = whole
                samples.append(Sample(metric, labels, whole))
        return tuple(samples)

    def values(self) -> tuple[Sample, ...]:
        """Return all values, ordered by metric as in :data:`METRICS`, and by labels."""
        with self._lock:
            values = dict(self._values)
        ordered = sorted(values.items(), key=lambda item: (METRICS.index(item[0][0]), item[0][1]))
        return tuple(Sample(metric, labels, value) for (metric, labels), value in ordered)


def samples_of(record: Record, started: RunStarted | None) -> Iterator[Sample]:
    """Yield the samples of a record. Totals start from 0 in a rank's first record, even if nothing is ever added to them.

    Args:
        record: The record.
        started: The rank's first record, which says which worker it is.
    """
    rank = str(record.rank), "" if started is None else started.name_of(started.worker)
    match record:
        case RunStarted():
            yield Sample(PREDICTED, rank, record.predicted)
            yield Sample(PLAN, rank, record.version)
            for metric in (STEPS, DETECTIONS, SWITCHES, FAILURES):
                yield Sample(metric, rank, 0.0)
        case StepTaken():
            yield from _step(record, rank, started)
        case StepReduces():
            for reduce in record.stages:
                for metric, seconds in ((HIDDEN, reduce.hidden), (EXPOSED, reduce.exposed)):
                    if seconds is not None:
                        yield Sample(metric, (*rank, reduce.name), seconds)
        case ControlEvent():
            yield from _event(record, rank)
        case PathsChanged():
            edge = (*rank, f"{record.source}>{record.destination}")
            yield Sample(PATH_FAILURES, edge, record.failures)
            yield Sample(PATH_CHANGES, edge, record.changes)
        case StepFailed():
            yield Sample(FAILURES, rank, 1.0)
        case NormsTold() | RunEnded():
            pass


def _step(record: StepTaken, rank: tuple[str, str], started: RunStarted | None) -> Iterator[Sample]:
    measurement = record.measurement
    yield Sample(STEPS, rank, 1.0)
    yield Sample(STEP, rank, measurement.seconds)
    yield Sample(PREDICTED, rank, record.predicted)
    yield Sample(PLAN, rank, record.version)
    for stage in measurement.stages:
        kinds = {"F": stage.forward, "I": stage.input_grad, "W": stage.weight_grad, "B": stage.both}
        for kind, seconds in kinds.items():
            if seconds is not None:
                yield Sample(STAGE, (*rank, str(stage.stage), kind), seconds)
    for edge, nbytes in zip(measurement.edges, record.nbytes, strict=True):
        labels = (*rank, f"{edge.source}>{edge.destination}")
        occupancy = edge.estimate.occupancy or 0.0
        yield Sample(LATENCY, labels, max(edge.estimate.flight - occupancy, 0.0))
        yield Sample(OCCUPANCY, labels, occupancy)
        yield Sample(WAITING, labels, edge.waiting)
        yield Sample(MESSAGES, labels, edge.messages)
        yield Sample(STALLS, labels, edge.stalls.count)
        yield Sample(BYTES, labels, nbytes)
    if (work := record.work) is not None:
        yield from _work(work, rank, started)
    if (reduce := measurement.reduce) is not None:
        yield Sample(REDUCE, rank, reduce.seconds)
        yield Sample(REDUCE_BYTES, rank, reduce.nbytes)


def _work(work: WorkerStep, rank: tuple[str, str], started: RunStarted | None) -> Iterator[Sample]:
    yield Sample(COMPUTE, rank, work.compute)
    if work.per_microbatch is not None:
        yield Sample(MICROBATCH, rank, work.per_microbatch)
    for metric, counts in ((TAKEN, work.taken), (GIVEN, work.given)):
        yield Sample(metric, rank, sum(number for _, number in counts))
    for worker, seconds in work.waits:
        yield Sample(WAITED, (*rank, str(worker) if started is None else started.name_of(worker)), seconds)


def _event(event: ControlEvent, rank: tuple[str, str]) -> Iterator[Sample]:
    match event.kind:
        case EventKind.DETECTED:
            yield Sample(DETECTIONS, rank, 1.0)
        case EventKind.SWITCHED:
            yield Sample(SWITCHES, rank, 1.0)
            yield Sample(PLAN, rank, event.version)
        case (
            EventKind.KEPT
            | EventKind.PROPOSED
            | EventKind.AGREED
            | EventKind.WITHDRAWN
            | EventKind.LIMITED
            | EventKind.SHARED
            | EventKind.DETOURED
            | EventKind.LATE
            | EventKind.EXCHANGED
            | EventKind.UPDATED
            | EventKind.MODE
            | EventKind.TRIAL
            | EventKind.STOLEN
            | EventKind.DEFERRED
            | EventKind.ROLES
            | EventKind.SPLIT
            | EventKind.COMPILED
            | EventKind.FORGOTTEN
            | EventKind.CONFIRMED
            | EventKind.REFUSED
            | EventKind.LOST
            | EventKind.HOSTED
            | EventKind.REDONE
            | EventKind.FENCED
            | EventKind.LINK
            | EventKind.COORDINATES
            | EventKind.RESIGNED
        ):
            pass
