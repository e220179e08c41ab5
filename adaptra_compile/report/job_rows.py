"""The rows of a timeline of several replicas, also as plain text. One replica is shown for all that are alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from adaptra.planning.routes.alike_replicas import merge_alike
from adaptra.report.text import RUNNING, check_width, lane
from adaptra.simulation.simulate import Simulation
from adaptra.simulation.timeline import OpInterval
from adaptra.simulation.worker_steps import worker_name

MOST_ROWS: Final = 64
"""With more workers than that, only replicas that differ are shown."""

_STEPS_AS_TEXT: Final = 2


@dataclass(frozen=True)
class WorkerRow:
    """One row: a worker and its ops.

    Attributes:
        replica: The replica to which the worker belongs.
        stages: The stages whose parameters it has.
        worker: Its number.
        lost: Whether it is lost.
        slow: The factor on the durations of its ops.
        steps: The intervals of its ops, per simulated step; none if it is lost.
    """

    replica: int
    stages: tuple[int, ...]
    worker: int
    lost: bool
    slow: float
    steps: tuple[tuple[OpInterval, ...], ...]

    @property
    def name(self) -> str:
        """The worker as ``REPLICA.STAGE``, with ``lost`` or its factor."""
        place = worker_name(self.replica, self.stages)
        return f"{place} lost" if self.lost else place if self.slow == 1 else f"{place} {self.slow:g}× slow"


@dataclass(frozen=True)
class JobRows:
    """The rows of all replicas that are shown.

    Attributes:
        rows: The rows, by replica and stage.
        stands_for: For each replica that is shown, the number of replicas that run like it, itself included.
        hidden: The number of replicas that neither are shown nor run like one that is.
    """

    rows: tuple[WorkerRow, ...]
    stands_for: dict[int, int]
    hidden: int


def job_rows(simulated: Simulation, most: int = MOST_ROWS) -> JobRows:
    """Return the rows of a simulated program.

    With up to ``most`` workers there is a row for each. With more, one replica stands for all that are alike. If the replicas
    that differ take more than ``most`` rows, those with lost or slow workers come first.
    """
    case, routing = simulated.case, simulated.program.routing
    groups: list[tuple[int, ...]] = [(replica,) for replica in range(case.replicas)]
    if case.workers > most:
        hurt = {case.replica_of(worker) for worker in (*case.lost, *case.slow)}
        found = merge_alike(case, routing).groups
        first = sorted(found, key=lambda group: (hurt.isdisjoint(group), len(group) == 1, group))
        groups = sorted(first[: max(1, most // case.stages)])
    rows: list[WorkerRow] = []
    for replica, *_ in groups:
        for stage in range(case.stages):
            worker, stages = routing.workers[replica][stage], case.stages_of(case.worker(replica, stage))
            if stage != stages[0]:
                continue
            if worker is None:
                rows.append(WorkerRow(replica, stages, case.worker(replica, stage), True, 1.0, ()))
            else:
                slow = case.slow.get(worker, 1.0)
                rows.append(WorkerRow(replica, stages, worker, False, slow, simulated.intervals(worker)))
    stands_for = {group[0]: len(group) for group in groups}
    return JobRows(tuple(rows), stands_for, case.replicas - sum(stands_for.values()))


def render_job(simulated: Simulation, width: int = 120) -> str:
    """Return a text of workers × time: the first two steps, one line per worker, dots where it waits.

    Ops of other replicas' microbatches have small letters. ``S`` is STEP and ``R`` is REDUCE.

    Args:
        simulated: The simulated program.
        width: The length of the longest line in characters, at least 40.

    Returns:
        The text, ending in a newline.

    Raises:
        ReportError: ``width`` is below 40.
    """
    check_width(width)
    shown = job_rows(simulated)
    labels = [f"{row.name} " for row in shown.rows]
    margin = max(map(len, labels))
    ends = [step[-1].end for row in shown.rows for step in row.steps[:_STEPS_AS_TEXT] if step]
    whole = max(ends, default=0.0)
    columns = width - margin
    lines = [f"two steps, to {whole:.6g}; small letters: microbatches of other replicas"]
    for label, row in zip(labels, shown.rows, strict=True):
        boxes = [(i.start, i.end, _label(row, i)) for step in row.steps[:_STEPS_AS_TEXT] for i in step]
        more = shown.stands_for[row.replica]
        if more > 1 and row.stages[0] == 0:
            lines.append(f"the next replica stands for {more}")
        ground = "/" * columns if row.lost else lane(boxes, columns / whole if whole else 0.0, columns)
        lines.append(label.ljust(margin) + ground)
    if shown.hidden:
        lines.append(f"and {shown.hidden} replicas more")
    return "\n".join(lines) + "\n"


def _label(row: WorkerRow, interval: OpInterval) -> str:
    op = interval.op
    if op.kind.is_update:
        return op.kind.value[0] + RUNNING
    letter = op.kind.value if op.replica == row.replica else op.kind.value.lower()
    stage = str(op.stage) if len(row.stages) > 1 else ""
    return f"{stage}{letter}{op.microbatch}"
