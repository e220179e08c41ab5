"""One rank's side of telemetry: passes its records to the recorder, and writes a trace of its last steps when one fails."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from adaptra.errors import AdaptraError
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.measuring.measurement import StepMeasurement
from adaptra.runtime.measuring.monitor import Monitor, StepRecords, merge_timelines
from adaptra.runtime.measuring.reduces import StepReduces
from adaptra.runtime.measuring.step_norms import StepNorms
from adaptra.runtime.telemetry.recorder import Recorder
from adaptra.runtime.telemetry.records import NormsTold, PathsChanged, Record, RunEnded, RunStarted, StepFailed, StepTaken
from adaptra.simulation.timeline import Timeline
from adaptra.simulation.worker_steps import Moved, WorkerStep, worker_step

if TYPE_CHECKING:
    from adaptra.runtime.transports.base import Transport

WriteTrace = Callable[[Sequence[tuple[str, Timeline]], Path], None]
"""Writes (title, timeline) pairs as a trace, see :func:`adaptra.report.perfetto.write`."""

REMEMBERED_STEPS: Final = 16
"""The number of steps whose plans a rank remembers; the monitor keeps fewer records."""

logger = logging.getLogger(__name__)


class RankTelemetry:
    """The records of one rank. Every call costs an entry in a queue, except :meth:`failed`, which writes a file.

    Args:
        rank: The rank.
        run: The name of the run, the same on all ranks, which a change of layout keeps.
        recorder: The process's recorder.
        transport: The rank's transport; its path counters are read on the recorder's thread.
        folder: The folder for the trace of the last steps when one fails, or None for no trace.
        write_trace: Writes the trace.
    """

    def __init__(
        self, rank: int, run: str, recorder: Recorder, transport: Transport, folder: Path | None, write_trace: WriteTrace
    ) -> None:
        self._rank = rank
        self._run = run
        self._recorder = recorder
        self._transport = transport
        self._folder = folder
        self._write_trace = write_trace
        self._predicted = 0.0
        self._version = self._agreed = 0
        self._awaited: float | None = None
        self._unsuspected: float | None = None
        self._plans: deque[tuple[int, float, Plan]] = deque(maxlen=REMEMBERED_STEPS)
        self._paths: dict[tuple[int, int], tuple[int, int]] = {}
        self._has_failed = False

    def started(self, plan: Plan) -> None:
        """Record that the rank is ready to begin under a plan, or to go on after a change of layout."""
        self._predicted = plan.predicted
        self._version = self._agreed = plan.version
        program, placement = plan.program, plan.case.placement
        ranks = len(set(placement))
        described = plan.version, program.name, plan.predicted, plan.bound
        replica = self._transport.worker_of(0) // ranks
        record = RunStarted(self._rank, self._run, ranks, program.microbatches, *described, replica, placement)
        self._recorder.record(lambda: (record,))

    def event(self, event: ControlEvent) -> None:
        """Record an event of the controller."""
        self._predict(event)
        self._recorder.record(lambda: (event,))

    def _predict(self, event: ControlEvent) -> None:
        """Take the prediction of the last agreed plan from an event, for now or for when that plan runs."""
        before = event.predicted_before
        match event.kind:
            case EventKind.AGREED:
                self._agreed = event.version
            case EventKind.WITHDRAWN if self._unsuspected is not None:
                self._predicted, self._unsuspected = self._unsuspected, None
            case EventKind.KEPT | EventKind.PROPOSED if before is not None and self._agreed == self._version:
                is_suspicion = event.text.startswith("in case of")
                self._unsuspected = self._predicted if is_suspicion else None
                self._predicted = before
            case EventKind.KEPT | EventKind.PROPOSED if before is not None:
                self._awaited = before
            case _:
                pass

    def begin_step(self, step: int, plan: Plan) -> None:
        """Record that the rank begins a step."""
        if self._plans and self._version != plan.version:
            self._predicted = plan.predicted if self._awaited is None or self._agreed != plan.version else self._awaited
            self._awaited = self._unsuspected = None
        self._version, self._agreed = plan.version, max(self._agreed, plan.version)
        self._plans.append((step, time.monotonic(), plan))

    def end_step(self, measurement: StepMeasurement, records: StepRecords, moved: Moved | None = None) -> None:
        """Record that the rank has run the step that it began last, with the microbatches that changed hands in it."""
        if self._recorder.follows_steps:
            _, _, plan = self._plans[-1]
            self._recorder.record(partial(self._step, measurement, records, plan, self._predicted, moved))

    def reduced(self, reduces: StepReduces) -> None:
        """Record REDUCE of a step on all ranks, which this rank has gathered."""
        if self._recorder.follows_steps:
            self._recorder.record(lambda: (reduces,))

    def normed(self, step: int, norms: StepNorms) -> None:
        """Record the norms of a step's gradients of this rank's stages."""
        if self._recorder.follows_steps:
            self._recorder.record(lambda: (NormsTold(self._rank, step, norms),))

    def failed(self, step: int, error: Exception, monitor: Monitor) -> None:
        """Record that the rank can't continue. Writes a trace of its last steps, and adds its path to the error. Only once."""
        if self._has_failed:
            return
        self._has_failed = True
        trace = None if self._folder is None else self._write_last_steps(self._folder, step, monitor)
        if trace is not None:
            error.add_note(f"the last steps of rank {self._rank} are in {trace}; adaptra trace draws them")
        record = StepFailed(self._rank, step, f"{type(error).__name__}: {error}", None if trace is None else str(trace))
        self._recorder.record(lambda: (record,))

    def ended(self, steps: int) -> None:
        """Record that the rank has closed."""
        record = RunEnded(self._rank, steps)
        self._recorder.record(lambda: (record,))

    def _work(self, records: StepRecords, plan: Plan, moved: Moved | None) -> WorkerStep:
        """Return what this rank did in a step, as a worker of the job."""
        worker_of = self._transport.worker_of
        timeline = merge_timelines(plan.program, [records], worker_of)
        worker, first = worker_of(self._rank), worker_of(0)
        if not plan.program.is_one_pipeline:
            return worker_step(timeline, worker)
        work = worker_step(timeline, self._rank)
        waits = tuple((worker_of(rank), seconds) for rank, seconds in work.waits)
        work = replace(work, worker=worker, replica=first // len(set(plan.case.placement)), waits=waits)
        if moved is None:
            return work
        return replace(work, own=work.own - sum(dict(moved.taken).values()), taken=moved.taken, given=moved.given)

    def _step(
        self, measurement: StepMeasurement, records: StepRecords, plan: Plan, predicted: float, moved: Moved | None
    ) -> Iterator[Record]:
        nbytes: Counter[tuple[int, int]] = Counter()
        for message in records.messages:
            if message.replica is None:
                nbytes[message.source, message.destination] += message.nbytes
        arrived = tuple(nbytes[edge.source, edge.destination] for edge in measurement.edges)
        yield StepTaken(measurement, arrived, plan.version, predicted, self._work(records, plan, moved), records)
        failures: Counter[tuple[int, int]] = Counter()
        changes: Counter[tuple[int, int]] = Counter()
        for counts in self._transport.path_counts():
            failures[counts.source, counts.destination] += counts.failures
            changes[counts.source, counts.destination] += counts.changes
        for edge in failures:
            before = self._paths.get(edge, (0, 0))
            self._paths[edge] = now = (failures[edge], changes[edge])
            if now != before:
                yield PathsChanged(self._rank, measurement.step, *edge, now[0] - before[0], now[1] - before[1])

    def _unfinished(self, step: int, start: float, monitor: Monitor) -> StepRecords | None:
        """Return the records of a step that broke off, or None if no op ran or its device can't be read."""
        try:
            records = monitor.unfinished(step, start, time.monotonic())
        except RuntimeError as error:
            logger.warning("rank %d: when the ops of step %d ran is not known: %s", self._rank, step, error)
            return None
        return records if records.ops else None

    def _write_last_steps(self, folder: Path, step: int, monitor: Monitor) -> Path | None:
        """Write the trace and return its path; None if there is nothing to write or the system refuses, which is logged."""
        plans = {of_step: (start, plan) for of_step, start, plan in self._plans}
        recorded = [(records, "") for records in monitor.kept if records.step in plans]
        if step in plans and (unfinished := self._unfinished(step, plans[step][0], monitor)) is not None:
            recorded.append((unfinished, ", broken off"))
        if not recorded:
            return None
        named = [
            (
                f"rank {self._rank}, step {records.step}, plan {plan.version}{end}",
                merge_timelines(plan.program, [records], self._transport.worker_of),
            )
            for records, end in recorded
            for _, plan in [plans[records.step]]
        ]
        path = folder / f"rank-{self._rank}.step-{step}.json"
        try:
            self._write_trace(named, path)
        except (AdaptraError, OSError) as error:
            logger.warning("rank %d: the records of its last steps could not be written: %s", self._rank, error)
            return None
        return path
