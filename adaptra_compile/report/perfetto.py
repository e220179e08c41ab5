"""Conversion of timelines to and from Chrome traces, which Perfetto opens.

Each timeline is a process and each rank a thread. Below the ranks are the threads of each directed edge. Messages on one thread
don't overlap, so an edge has as many threads as it had messages in flight. An arrow goes from the op that produces a message,
through the message, to the op that consumes it. With several replicas the threads are workers, and the edges pairs of workers.
An op of another replica's microbatch is named with its home. A simulation may add its updates and its later steps.

Perfetto reads microseconds. Each event's ``args`` has the exact times in the timeline's own unit, so that :func:`load_all`
returns equal timelines. ``docs/formats.md`` describes the format.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from adaptra.checks import is_finite
from adaptra.errors import ReportError, ScheduleError
from adaptra.json_files import read_json
from adaptra.program import Kind, Op, Program, parse_recorded_op
from adaptra.program.dependencies import RULE, SENT_BY, USED_BY, other_end
from adaptra.report.files import check_suffix, write_whole
from adaptra.report.text import origin
from adaptra.simulation.standing_out import slow_links_of
from adaptra.simulation.timeline import MessageInterval, OpInterval, ReduceInterval, Source, Timeline
from adaptra.simulation.worker_steps import is_foreign, place_of, worker_name

FORMAT: Final = "adaptra-trace"
FORMAT_VERSION: Final = 3

SECONDS_PER_CASE_UNIT: Final = 1e-3
"""Seconds that Perfetto shows for one unit of a timeline without a known unit."""

_FIRST_EDGE_THREAD: Final = 1001
_ARGUMENTS: Final = {"op": ("start", "end"), "message": ("posted", "departed", "arrived"), "reduce": ("start", "end")}


def trace(
    timelines: Sequence[tuple[str, Timeline]],
    slow_edges: Iterable[tuple[int, int]] = (),
    *,
    steps: Sequence[Sequence[Sequence[OpInterval]]] = (),
) -> dict[str, Any]:
    """Return the trace of (title, timeline) pairs as a JSON object. Each time axis starts where the makespan does.

    Args:
        timelines: The pairs.
        slow_edges: (sending stage, receiving stage) pairs whose threads are marked as slow. With several replicas the links of
            workers are marked instead that were unusually slow.
        steps: The intervals of all ops, per step in a row and per rank, of which each timeline is the first. Updates and later
            steps are shown too. They are not read back.
    """
    slow = frozenset(slow_edges)
    ids = count(1)
    events: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for process, (title, timeline) in enumerate(timelines, 1):
        events += _events(process, title, timeline, slow, ids)
        events += _later(process, timeline, steps, ids)
        runs.append(
            {
                "title": title,
                "source": timeline.source.value,
                "seconds_per_unit": timeline.seconds_per_unit,
                "program": str(timeline.program),
            }
        )
    other = {"format": FORMAT, "version": FORMAT_VERSION, "runs": runs}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def write(
    timelines: Sequence[tuple[str, Timeline]],
    path: str | Path,
    slow_edges: Iterable[tuple[int, int]] = (),
    *,
    steps: Sequence[Sequence[Sequence[OpInterval]]] = (),
) -> None:
    """Write the trace, as of :func:`trace`, to a ``.json`` file, which appears whole or not at all.

    Raises:
        ReportError: The suffix is unknown, the folder does not exist, or the system refuses.
    """
    check_suffix(path, (".json",))
    write_whole(path, json.dumps(trace(timelines, slow_edges, steps=steps), allow_nan=False) + "\n")


def load(path: str | Path, run: int = 0) -> Timeline:
    """Read the timeline number ``run`` of a trace file.

    Raises:
        ReportError: As :func:`load_all`, or the file has no such run.
    """
    runs = load_all(path)
    if not 0 <= run < len(runs):
        raise ReportError(f"{path}: run {run}: expected one of the {len(runs)} runs that the trace holds, counted from 0")
    return runs[run][1]


def load_all(path: str | Path) -> tuple[tuple[str, Timeline], ...]:
    """Read all (title, timeline) pairs of a trace file. They equal those that were written.

    Raises:
        ReportError: The file can't be read, is not a trace of this format and version, or has an impossible event. The text
            names the file and what was expected.
    """
    data = read_json(path, ReportError)
    try:
        return _read(data)
    except (ReportError, ScheduleError) as error:
        raise ReportError(f"{path}: {error}") from None


def _events(
    process: int, title: str, timeline: Timeline, slow: frozenset[tuple[int, int]], ids: Iterator[int]
) -> Iterator[dict[str, Any]]:
    zero = origin(timeline)
    scale = 1e6 * (timeline.seconds_per_unit or SECONDS_PER_CASE_UNIT)
    program = timeline.program
    yield named(process, 0, "process", title)
    for rank in range(len(timeline.ops)):
        yield named(process, rank + 1, "thread", _rank_name(program, rank))
    middle: dict[tuple[int, int, Kind, int], tuple[int, float]] = {}
    for interval in timeline:
        op, thread = interval.op, interval.rank + 1
        start, length = (interval.start - zero) * scale, (interval.end - interval.start) * scale
        times = {"start": interval.start, "end": interval.end}
        away = op.replica if is_foreign(program, interval) else None
        yield slice_of(process, thread, op_name(op, away), op.kind.value, start, length, {"op": program.text_of(op)} | times)
        middle[op.replica, op.stage, op.kind, op.microbatch] = thread, start + length / 2
    for reduce in timeline.reduces:
        times = {"start": reduce.start, "end": reduce.end}
        start, length = (reduce.start - zero) * scale, (reduce.end - reduce.start) * scale
        arguments = {"reduce": reduce.rank, "bytes": reduce.nbytes, "exposed": reduce.exposed} | times
        arguments |= {} if reduce.choice is None else {"choice": reduce.choice}
        yield slice_of(process, reduce.rank + 1, "REDUCE", "REDUCE", start, length, arguments)
        if reduce.exposed:  # Perfetto draws it within the slice of the whole sum
            start, length = (reduce.end - reduce.exposed - zero) * scale, reduce.exposed * scale
            yield slice_of(process, reduce.rank + 1, "exposed", "REDUCE", start, length, {"exposed": reduce.rank})
    threads = tuple(_message_threads(timeline, slow))
    for thread, label in sorted(set(threads)):
        yield named(process, thread, "thread", label)
    # In the timeline's own order, which the reader keeps for messages posted at one time.
    for (thread, _), message in zip(threads, timeline.messages, strict=True):
        name = program.text_of(message.send)
        start, length = (message.posted - zero) * scale, (message.arrived - message.posted) * scale
        times = {"posted": message.posted, "departed": message.departed, "arrived": message.arrived}
        arguments = {"message": name, "destination": message.destination} | times
        yield slice_of(process, thread, name, message.kind.value, start, length, arguments)
        yield from _flow(process, message, middle, (thread, start + length / 2), ids)


def _later(
    process: int, timeline: Timeline, steps: Sequence[Sequence[Sequence[OpInterval]]], ids: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """Yield what steps in a row have beyond the compute ops of the first: updates, and later steps with their arrows."""
    program, zero = timeline.program, origin(timeline)
    scale = 1e6 * (timeline.seconds_per_unit or SECONDS_PER_CASE_UNIT)
    for number, orders in enumerate(steps):
        middle: dict[tuple[int, int, Kind, int], tuple[int, float]] = {}
        for interval in (interval for order in orders for interval in order):
            op, text, thread = interval.op, program.text_of(interval.op), interval.rank + 1
            if op.kind.is_compute and number == 0:
                continue
            start, length = (interval.start - zero) * scale, (interval.end - interval.start) * scale
            name = op_name(op, op.replica if is_foreign(program, interval) else None) if op.kind.is_compute else text
            arguments = {"step": number, "runs": text, "start": interval.start, "end": interval.end}
            yield slice_of(process, thread, name, op.kind.value, start, length, arguments)
            if op.kind.is_compute:
                middle[op.replica, op.stage, op.kind, op.microbatch] = thread, start + length / 2
        for message in timeline.messages if number else ():
            yield from _flow(process, message, middle, None, ids)


def _flow(
    process: int,
    message: MessageInterval,
    middle: Mapping[tuple[int, int, Kind, int], tuple[int, float]],
    way: tuple[int, float] | None,
    ids: Iterator[int],
) -> Iterator[dict[str, Any]]:
    """Yield the arrow from producer to consumer, through the message if shown. Its points are in the middle of slices."""
    send, receive = message.send, other_end(message.send)
    producers = [(row.kinds, send.microbatch + row.later) for row in RULE[send.kind]] or [((), 0)]  # a batch is made by no op
    consumer = USED_BY.get(receive.kind, ()), receive.microbatch
    ends = [
        next((middle[key] for kind in kinds if (key := (message.replica, stage, kind, microbatch)) in middle), None)
        for stage, (kinds, microbatch) in ((send.stage, producers[0]), (receive.stage, consumer))
    ]
    number = next(ids)
    for phase, point in zip("stf", (ends[0], way, ends[1]), strict=True):
        if point is not None:
            yield arrow_point(phase, number, process, *point)


def arrow_point(phase: str, number: int, process: int, thread: int, time: float) -> dict[str, Any]:
    """Return a point of an arrow in the middle of a slice: its start (``s``), a point between (``t``), or its end (``f``)."""
    flow = {"ph": phase, "id": number, "pid": process, "tid": thread, "ts": time, "name": "message", "cat": "flow"}
    return flow | ({"bp": "e"} if phase == "f" else {})


def op_name(op: Op, home: int | None) -> str:
    """Return an op's name in a trace, with its home if that is another replica than its worker's."""
    name = f"{op.stage}{op.kind.value}{op.microbatch}"
    return name if home is None else f"{name} of replica {home}"


def _rank_name(program: Program, rank: int) -> str:
    if rank not in program.routing.live:
        return f"worker {rank} (lost)"
    replica, stages = place_of(program, rank)
    if program.is_one_pipeline:
        return f"rank {rank} (stage {', '.join(map(str, stages))})"
    return f"worker {rank} ({worker_name(replica, stages)})"


def _message_threads(timeline: Timeline, slow: frozenset[tuple[int, int]]) -> Iterator[tuple[int, str]]:
    """Yield, per message, a thread on which it overlaps no other message, and the thread's name. Threads are sorted by edge.

    With several replicas there is an edge for each pair of workers.
    """
    program, messages = timeline.program, timeline.messages
    by_edge: defaultdict[tuple[tuple[int, int], ...], list[MessageInterval]] = defaultdict(list)
    for message in messages:
        edge = message.source, message.destination
        by_edge[(edge,) if program.is_one_pipeline else (edge, timeline.ends_of(message))].append(message)
    thread_of: dict[MessageInterval, tuple[int, str]] = {}
    threads = count(_FIRST_EDGE_THREAD)
    links = slow_links_of(timeline)
    for ((source, destination), *workers), on_edge in sorted(by_edge.items()):
        name, is_slow = f"stage {source} → {destination}", (source, destination) in slow
        for ends in workers:
            name, is_slow = " → ".join(worker_name(*place_of(program, end)) for end in ends), ends in links
        name += ", slow" if is_slow else ""
        lanes: list[tuple[int, str]] = []
        free: list[float] = []
        for message in sorted(on_edge, key=lambda message: message.posted):
            lane = next((lane for lane, until in enumerate(free) if until <= message.posted), len(lanes))
            if lane == len(lanes):
                lanes.append((next(threads), name + (f" #{lane + 1}" if lane else "")))
                free.append(message.arrived)
            free[lane] = message.arrived
            thread_of[message] = lanes[lane]
    return (thread_of[message] for message in messages)


def named(process: int, thread: int, what: str, name: str) -> dict[str, Any]:
    """Return the event that names a process or a thread."""
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": {"name": name}}


def slice_of(
    process: int, thread: int, name: str, category: str, start: float, length: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the slice that begins at ``start`` and takes ``length``, in microseconds."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": length,
        "args": arguments,
    }


def _read(data: Any) -> tuple[tuple[str, Timeline], ...]:
    other = data.get("otherData") if isinstance(data, Mapping) else None
    if not isinstance(other, Mapping) or other.get("format") != FORMAT:
        raise ReportError(f"not an adaptra trace: expected otherData.format to be {FORMAT!r}")
    if other.get("version") != FORMAT_VERSION:
        raise ReportError(f"trace version {other.get('version')!r}: this adaptra reads version {FORMAT_VERSION}")
    runs, events = other.get("runs"), data.get("traceEvents")
    if not isinstance(runs, list) or not isinstance(events, list):
        raise ReportError("expected a list traceEvents and a list otherData.runs")
    by_process: defaultdict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for number, event in enumerate(events):
        if not isinstance(event, Mapping):
            raise ReportError(f"traceEvents[{number}]: expected an object, got {event!r}")
        if event.get("ph") == "X":
            by_process[event.get("pid")].append(event)
    return tuple(_read_run(run, by_process[number]) for number, run in enumerate(runs, 1))


def _read_run(run: Any, events: Iterable[Mapping[str, Any]]) -> tuple[str, Timeline]:
    match run:
        case {"title": str(title), "source": "simulated" | "measured" as source, "program": str(text)}:
            program = Program.parse(text)
        case _:
            raise ReportError(f"run {run!r}: expected title, source (simulated or measured), program and seconds_per_unit")
    unit = run.get("seconds_per_unit")
    if unit is not None and not (is_finite(unit) and unit > 0):
        raise ReportError(f"seconds_per_unit {unit!r}: expected a number above 0 or null")
    return title, _read_slices(program, Source(source), unit, events)


def _read_slices(program: Program, source: Source, unit: float | None, events: Iterable[Mapping[str, Any]]) -> Timeline:
    orders: list[list[OpInterval]] = [[] for _ in range(program.ranks)]
    messages: list[MessageInterval] = []
    reduces: list[ReduceInterval] = []
    for event in events:
        match event.get("args"):
            case {"op": str(token)} as arguments:
                op = parse_recorded_op(token)
                if not op.kind.is_compute or not _is_of(program, op):
                    raise ReportError(f"event {token}: expected a compute op of the stages 0..{program.stages - 1}")
                rank = program.holder(op.replica, op.stage, op.microbatch)
                orders[rank].append(OpInterval(rank, op, *_times(token, arguments, "op")))
            case {"message": str(token), "destination": int(destination)} as arguments:
                op = parse_recorded_op(token)
                is_send = op.kind in SENT_BY.values() and _is_of(program, op)
                if not is_send or not 0 <= destination < program.stages:
                    raise ReportError(f"event {token} to {destination}: expected a SEND between stages 0..{program.stages - 1}")
                posted, departed, arrived = _times(token, arguments, "message")
                place = op.kind, op.stage, destination, op.microbatch
                messages.append(MessageInterval(*place, posted, departed, arrived, op.replica))
            case {"reduce": int(rank), "bytes": int(nbytes)} as arguments:
                if not 0 <= rank < program.ranks or nbytes < 0:
                    raise ReportError(f"event REDUCE of rank {rank}: expected one of the ranks 0..{program.ranks - 1}")
                start, end = _times("REDUCE", arguments, "reduce")
                exposed = arguments.get("exposed")
                if exposed is not None and not (is_finite(exposed) and 0.0 <= exposed <= end - start):
                    raise ReportError(f"event REDUCE: exposed {exposed!r}: expected a time of at most end - start, or null")
                choice = arguments.get("choice")
                if choice is not None and not isinstance(choice, str):
                    raise ReportError(f"event REDUCE: choice {choice!r}: expected a text or none")
                known = None if exposed is None else float(exposed)
                reduces.append(ReduceInterval(rank, start, end, nbytes, known, choice))
            case {"exposed": int(_)} | {"step": int(_)}:
                pass  # the slice of REDUCE has it too; an update or a later step belongs to no timeline
            case arguments:
                raise ReportError(f"event with args {arguments!r}: expected those of an op, of a message or of REDUCE")
    for order in orders:
        order.sort(key=lambda interval: interval.start)
    messages.sort(key=lambda message: message.posted)
    return Timeline(program, source, tuple(map(tuple, orders)), tuple(messages), unit, tuple(reduces))


def _is_of(program: Program, op: Op) -> bool:
    """Return whether a program has this op's replica, stage and microbatch."""
    microbatches = program.microbatches + (op.kind is Kind.SEND_BUFFERS)  # behind the last one they go home
    return op.replica < program.replicas and op.stage < program.stages and op.microbatch < microbatches


def _times(token: str, arguments: Mapping[str, Any], what: str) -> tuple[float, ...]:
    names = _ARGUMENTS[what]
    values: list[Any] = [arguments.get(name) for name in names]
    times = tuple(float(value) for value in values if is_finite(value))
    if len(times) < len(names) or list(times) != sorted(times):
        raise ReportError(f"event {token}: expected finite {' <= '.join(names)}, got {', '.join(map(str, values))}")
    return times
