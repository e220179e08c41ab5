"""Conversion of simulated programs of several replicas to Chrome traces, which Perfetto opens.

Each replica is a process and each worker a thread. An op of another replica's microbatch is named with its home. An arrow goes
from an op to the op on the next worker that needs its activation or gradient. ``docs/formats.md`` describes the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

from adaptra.program import Kind, Program
from adaptra.report.files import check_suffix, write_whole
from adaptra.report.job_picture import STEPS_SHOWN
from adaptra.report.job_rows import WorkerRow, job_rows
from adaptra.report.perfetto import SECONDS_PER_CASE_UNIT, arrow_point, named, op_name, slice_of
from adaptra.simulation.simulate import Simulation
from adaptra.simulation.timeline import OpInterval

JOB_FORMAT: Final = "adaptra-job-trace"
FORMAT_VERSION: Final = 1
_SCALE: Final = 1e6 * SECONDS_PER_CASE_UNIT


def job_trace(simulated: Simulation) -> dict[str, Any]:
    """Return the trace of a simulated program's first steps as a JSON object. One unit of time is 1000 µs.

    It has the workers that pictures show: with many, one replica for all that are alike.
    """
    shown = job_rows(simulated)
    events: list[dict[str, Any]] = []
    for replica, number in shown.stands_for.items():
        stands = f", stands for {number}" if number > 1 else ""
        events.append(named(replica + 1, 0, "process", f"replica {replica}{stands}"))
    for row in shown.rows:
        events.append(named(row.replica + 1, row.worker + 1, "thread", f"worker {row.worker} ({row.name})"))
    found: dict[tuple[int, int, int, Kind, int], tuple[WorkerRow, OpInterval]] = {}
    for row in shown.rows:
        for step, intervals in enumerate(row.steps[:STEPS_SHOWN]):
            for interval in intervals:
                events.append(_slice(simulated.program, row, step, interval))
                op = interval.op
                if op.kind.is_compute:
                    found[step, op.replica, op.stage, op.kind, op.microbatch] = row, interval
    events += _arrows(found)
    other = {
        "format": JOB_FORMAT,
        "version": FORMAT_VERSION,
        "period": simulated.period,
        "case": simulated.case.to_json(),
        "program": str(simulated.program),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def write_job_trace(simulated: Simulation, path: str | Path) -> None:
    """Write the trace to a ``.json`` file, which appears whole or not at all.

    Raises:
        ReportError: The suffix is unknown, the folder does not exist, or the system refuses.
    """
    check_suffix(path, (".json",))
    write_whole(path, json.dumps(job_trace(simulated), allow_nan=False) + "\n")


def _slice(program: Program, row: WorkerRow, step: int, interval: OpInterval) -> dict[str, Any]:
    op, start, end = interval.op, interval.start, interval.end
    text, home = program.text_of(op), op.replica
    name = text if op.kind.is_update else op_name(op, home if home != row.replica else None)
    arguments = {"op": text, "step": step, "home": home, "start": start, "end": end}
    return slice_of(row.replica + 1, row.worker + 1, name, op.kind.value, start * _SCALE, (end - start) * _SCALE, arguments)


def _arrows(found: dict[tuple[int, int, int, Kind, int], tuple[WorkerRow, OpInterval]]) -> Iterator[dict[str, Any]]:
    """Yield the arrows between workers, from the middle of an op to the middle of the op that needs it."""
    ids = count(1)
    for (step, replica, stage, kind, microbatch), source in found.items():
        if kind is Kind.W:
            continue
        after, kinds = (stage + 1, (Kind.F,)) if kind is Kind.F else (stage - 1, (Kind.I, Kind.B))
        target = next((found[key] for one in kinds if (key := (step, replica, after, one, microbatch)) in found), None)
        if target is None or target[0].worker == source[0].worker:
            continue
        number = next(ids)
        for phase, (row, interval) in zip("sf", (source, target), strict=True):
            middle = (interval.start + interval.end) / 2 * _SCALE
            yield arrow_point(phase, number, row.replica + 1, row.worker + 1, middle)
