"""The monitor: one rank's record of ops, messages and waits, at the cost of an append each.

The executor records while a step runs. :meth:`Monitor.end_step` condenses the step to the small vector that the detector reads,
and keeps the raw records of the last few steps for traces. Records are plain JSON, so the records of all ranks can be merged
into one timeline.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, NamedTuple

from adaptra.collectives.late_ranks import SumChoice
from adaptra.errors import ControlError, ScheduleError
from adaptra.json_files import Fields
from adaptra.program import Kind, Op, Program, parse_recorded_op
from adaptra.program.dependencies import SENT_BY
from adaptra.program.placement import stages_of
from adaptra.runtime.measuring.measurement import (
    EdgeEstimate,
    EdgeMeasurement,
    ReduceTimes,
    StageMeasurement,
    StepMeasurement,
    choice_to_json,
    estimate_edge,
    read_choice,
)
from adaptra.runtime.measuring.reduces import FirstOp, exposed_seconds
from adaptra.runtime.measuring.stalls import StallTracker
from adaptra.runtime.rdma.watch import RdmaEvent
from adaptra.simulation.timeline import MessageInterval, OpInterval, ReduceInterval, Source, Timeline

_SENDS: Final = frozenset(kind.value for kind in SENT_BY.values())
_KEPT_LINKS: Final = 64

_KEPT_TRACKERS: Final = 1024
"""The number of stall trackers that are kept, one for each edge and shape of batch: the last used ones."""


class OpRecord(NamedTuple):
    """A compute op and its start and end, in seconds of the monotonic clock."""

    op: Op
    start: float
    end: float


class MessageRecord(NamedTuple):
    """A message that arrived: ``kind`` is that of the SEND, ``source`` and ``destination`` are stages, times are seconds.

    The sender posted it at ``sent_at``, it was complete at ``arrived_at``, and an op used it at ``consumed_at``.
    ``departed_at`` is ``sent_at``, or the time of the receiver's request if the message may have waited for that.
    ``replica`` is None for a message between two workers of its microbatch's replica. Else it is that replica.
    """

    kind: Kind
    source: int
    destination: int
    microbatch: int
    nbytes: int
    sent_at: float
    departed_at: float
    arrived_at: float
    consumed_at: float
    replica: int | None = None


class ReduceRecord(NamedTuple):
    """The sum of a rank's gradients over the replicas: its start and end in seconds of the monotonic clock, and its bytes.

    ``exposed`` are the seconds by which it delayed the rank's next step. They are None until that has ended, or if not known.
    ``choice`` says how it was made, where a job chooses, and when the replicas came to it.
    """

    start: float
    end: float
    nbytes: int
    exposed: float | None = None
    choice: SumChoice | None = None


@dataclass(frozen=True, slots=True)
class StepRecords:
    """All records of one rank in one step, in the order of the events. ``reduce`` is None without other replicas."""

    rank: int
    step: int
    start: float
    end: float
    ops: tuple[OpRecord, ...]
    messages: tuple[MessageRecord, ...]
    reduce: ReduceRecord | None = None

    def shifted(self, seconds: float) -> StepRecords:
        """Return the records by a clock that is so far ahead of this rank's."""
        return StepRecords(
            self.rank,
            self.step,
            self.start + seconds,
            self.end + seconds,
            tuple(OpRecord(op, start + seconds, end + seconds) for op, start, end in self.ops),
            tuple(
                MessageRecord(*one[:5], *(instant + seconds for instant in one[5:9]), replica=one.replica)
                for one in self.messages
            ),
            self.reduce and self.reduce._replace(start=self.reduce.start + seconds, end=self.reduce.end + seconds),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that :meth:`from_json` reads back to equal records."""
        return {
            "rank": self.rank,
            "step": self.step,
            "start": self.start,
            "end": self.end,
            "ops": [{"op": str(op), "start": start, "end": end} for op, start, end in self.ops],
            "messages": [{**message._asdict(), "kind": message.kind.value} for message in self.messages],
            "reduce": None if self.reduce is None else _reduce_to_json(self.reduce),
        }

    @staticmethod
    def from_json(data: object) -> StepRecords:
        """Read the records of a step.

        Raises:
            ControlError: A field is missing, unknown or invalid.
        """
        fields = Fields(data, "records of a step")
        records = StepRecords(
            rank=fields.whole("rank"),
            step=fields.whole("step"),
            start=fields.instant("start"),
            end=fields.instant("end"),
            ops=tuple(map(_read_op, fields.objects("ops"))),
            messages=tuple(map(_read_message, fields.objects("messages"))),
            reduce=None if (reduce := fields.raw("reduce")) is None else _read_reduce(reduce),
        )
        fields.end()
        return records


def _read_op(fields: Fields) -> OpRecord:
    try:
        op = parse_recorded_op(fields.text("op", at_most=64))
    except ScheduleError as error:
        raise ControlError(f"records of a step: {error}") from None
    record = OpRecord(op, fields.instant("start"), fields.instant("end"))
    fields.end()
    return record


def _read_message(fields: Fields) -> MessageRecord:
    kind = fields.text("kind", at_most=16)
    if kind not in _SENDS:
        raise ControlError(f"records of a step: message of kind {kind!r}: expected SEND_F, SEND_B or another SEND")
    whole = [fields.whole(name) for name in ("source", "destination", "microbatch", "nbytes")]
    instants = [fields.instant(name) for name in ("sent_at", "departed_at", "arrived_at", "consumed_at")]
    replica = fields.whole_or_none("replica")
    fields.end()
    return MessageRecord(Kind(kind), *whole, *instants, replica=replica)


def _reduce_to_json(reduce: ReduceRecord) -> dict[str, Any]:
    fields = reduce._asdict()
    del fields["choice"]
    return fields if reduce.choice is None else fields | {"choice": choice_to_json(reduce.choice)}


def _read_reduce(data: object) -> ReduceRecord:
    fields = Fields(data, "records of a step: reduce")
    span = fields.instant("start"), fields.instant("end")
    choice = None if (found := fields.raw("choice", None)) is None else read_choice(found)
    record = ReduceRecord(*span, fields.whole("nbytes"), fields.number_or_none("exposed"), choice)
    fields.end()
    return record


class LinkRecord(NamedTuple):
    """An event of an RDMA device, its time on the monotonic clock in seconds, and the state of its ports."""

    at: float
    event: RdmaEvent


@dataclass(slots=True)
class _Between:
    """What lies between the last step and the next one: nothing that ranks waited for, or a meeting of all of them."""

    is_nothing: bool = False
    has_met: bool = False


class Monitor:
    """Records of one rank.

    The thread that runs the steps uses it. Any thread may read links, :meth:`records` and :meth:`timeline`.

    Args:
        rank: This rank.
        placement: ``placement[stage]`` is the stage's rank.
        keep: The number of steps whose raw records are kept.
        read: Converts the marks of the rank's clock to seconds, as :meth:`adaptra.runtime.devices.device_clock.OpClock.read`.
    """

    def __init__(
        self,
        rank: int,
        placement: Sequence[int],
        keep: int = 8,
        read: Callable[[Sequence[Any]], list[float]] = list,
    ) -> None:
        self._read = read
        self._rank = rank
        self._own = stages_of(rank, placement)
        self._kept: deque[StepRecords] = deque(maxlen=keep)
        self._ops: list[tuple[Op, Any, Any]] = []
        self._messages: list[tuple[Kind, int, int, int, int, float, float, float, Any, int | None]] = []
        self._waits: list[tuple[Op, Any, Any]] = []
        self._probes: dict[tuple[int, int], tuple[float, float]] = {}
        self._rates: dict[tuple[int, int], EdgeEstimate] = {}
        self._occupancies: dict[tuple[int, int], float] = {}
        self._reduce: tuple[Any, Any, int, SumChoice | None] | None = None
        self._first = FirstOp()
        self._between = _Between()
        self._links: deque[LinkRecord] = deque(maxlen=_KEPT_LINKS)
        self._stalling: OrderedDict[tuple[int, int, int], StallTracker] = OrderedDict()

    @property
    def links(self) -> tuple[LinkRecord, ...]:
        """The last events of this rank's RDMA devices, oldest first."""
        return tuple(self._links)

    def link(self, event: RdmaEvent, at: float) -> None:
        """Record an event of an RDMA device at a time of the monotonic clock, seconds."""
        self._links.append(LinkRecord(at, event))

    def begin_step(self) -> None:
        """Discard the records since the last :meth:`end_step`, which belong to a failed step or to one that only evaluated."""
        if self._first.ready is not None or self._ops:
            self._between.is_nothing = False
        self._ops, self._messages, self._waits, self._probes, self._rates, self._reduce = [], [], [], {}, {}, None
        self._first = FirstOp()

    def ready(self, mark: Any) -> None:
        """Record the mark of the rank's clock at which the rank could begin its first op, but for that op's message."""
        self._first.ready = mark

    def meet(self, *, all_ranks: bool) -> None:
        """Record that ranks of the pipeline wait for each other between the last step and the next one.

        The next step begins for them after that, so it does not show what the end of the last one cost a rank. If all meet, it
        is behind a barrier.
        """
        self._between = _Between(has_met=self._between.has_met or all_ranks)

    def op(self, op: Op, start: Any, end: Any) -> None:
        """Record that a compute op ran between two marks of the rank's clock."""
        self._ops.append((op, start, end))

    def message(
        self,
        kind: Kind,
        source: int,
        destination: int,
        microbatch: int,
        nbytes: int,
        sent_at: float,
        departed_at: float,
        arrived_at: float,
        consumed: Any,
        replica: int | None = None,
    ) -> None:
        """Record that a message arrived; see :class:`MessageRecord`. ``consumed`` is a mark of the rank's clock."""
        instants = (sent_at, departed_at, arrived_at, consumed)
        self._messages.append((kind, source, destination, microbatch, nbytes, *instants, replica))
        if not self._ops:
            self._first.needs((source, destination) if replica is None else None, sent_at, departed_at, arrived_at)

    def wait(self, op: Op, start: Any, end: Any) -> None:
        """Record that a compute op waited for its message between two marks of the rank's clock."""
        self._waits.append((op, start, end))

    def probe(self, source: int, destination: int, departed_at: float, arrived_at: float) -> None:
        """Record a probe: a message of a few bytes that crossed an edge only to be timed."""
        self._probes[source, destination] = departed_at, arrived_at

    def rate_probe(self, source: int, destination: int, latency: float, occupancy: float) -> None:
        """Record a rate probe: messages as large as others, over an edge that no others take."""
        self._rates[source, destination] = EdgeEstimate(latency + occupancy, occupancy, None)

    def occupancy(self, source: int, destination: int) -> float | None:
        """Return the last occupancy that messages over an edge to this rank told, in seconds; None if they told none yet."""
        return self._occupancies.get((source, destination))

    def reduce(self, start: Any, end: Any, nbytes: int) -> None:
        """Record that the step's gradients were added over the replicas between two marks, and their bytes."""
        self._reduce = start, end, nbytes, None

    def chose(self, choice: SumChoice) -> None:
        """Record how the step's gradients were added, which :meth:`reduce` has recorded, and when the replicas came to it."""
        if self._reduce is not None:
            self._reduce = *self._reduce[:3], choice

    def end_step(self, step: int, start: float, end: float, shape: int = 0) -> StepMeasurement:
        """Condense the step that ran from ``start`` to ``end``, keep its records and begin the next step.

        REDUCE of the step before is condensed with it, as only now its delay is known. ``shape`` is the code of the batch's
        shape: a large message after a small one has not stalled.
        """
        records, ready, waits = self._finished(step, start, end)
        edges = self._measure_edges(records, waits, shape)
        reduce, update = self._measure_reduce(records, ready, edges), self._measure_update(records, ready)
        self.begin_step()
        has_met, self._between = self._between.has_met, _Between(is_nothing=True)
        self._kept.append(records)
        durations = _durations(records)
        pause = max((max(values) - median(values) for values in durations.values()), default=0.0)
        stages = self._measure_stages(durations)
        return StepMeasurement(self._rank, step, records.end - start, stages, edges, pause, reduce, has_met, update)

    @property
    def kept(self) -> tuple[StepRecords, ...]:
        """The records of the last steps, oldest first."""
        return tuple(self._kept)

    def unfinished(self, step: int, start: float, end: float) -> StepRecords:
        """Return the records since :meth:`begin_step`, as those of a step that broke off at ``end``."""
        return self._finished(step, start, end)[0]

    def _finished(self, step: int, start: float, end: float) -> tuple[StepRecords, float, list[tuple[Op, float]]]:
        """Return the records since :meth:`begin_step`, when the rank was ready for its first op, and the seconds of waits."""
        begun = [] if self._first.ready is None else [self._first.ready]
        reducing = [] if self._reduce is None else self._reduce[:2]
        spans = [mark for _, *marks in (*self._ops, *self._waits) for mark in marks]
        marks = iter(self._read([*begun, *spans, *(message[8] for message in self._messages), *reducing]))
        ready = next(marks) if begun else start
        ops = tuple(OpRecord(op, next(marks), next(marks)) for op, *_ in self._ops)
        waits = [(op, -next(marks) + next(marks)) for op, *_ in self._waits]
        messages = tuple(MessageRecord(*one[:8], next(marks), one[9]) for one in self._messages)
        reduce = (
            None if self._reduce is None else ReduceRecord(next(marks), next(marks), self._reduce[2], None, self._reduce[3])
        )
        # A GPU may finish an op or the sum after the host has ended the step.
        latest = max((*(op.end for op in ops), *(() if reduce is None else (reduce.end,))), default=end)
        return StepRecords(self._rank, step, start, max(end, latest), ops, messages, reduce), ready, waits

    def records(self, step: int) -> StepRecords:
        """Return the records of a step.

        Raises:
            KeyError: The step's records are not kept any more.
        """
        kept = self.kept
        for records in kept:
            if records.step == step:
                return records
        raise KeyError(f"step {step}: the records of rank {self._rank} hold the steps {[records.step for records in kept]}")

    def timeline(self, program: Program, step: int) -> Timeline:
        """Return this rank's part of a step's timeline: its own ops and the messages that reached it.

        The parts of the other ranks are empty.

        Raises:
            KeyError: The step's records are not kept any more.
        """
        return merge_timelines(program, [self.records(step)])

    def _measure_stages(self, durations: Mapping[tuple[int, Kind], Sequence[float]]) -> tuple[StageMeasurement, ...]:
        medians = {key: median(values) for key, values in durations.items()}
        return tuple(
            StageMeasurement(stage, *(medians.get((stage, kind)) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)))
            for stage in self._own
        )

    def _measure_reduce(self, records: StepRecords, ready: float, edges: Sequence[EdgeMeasurement]) -> ReduceTimes | None:
        """Return REDUCE of the step before these records, and keep its exposed part with that step's records."""
        before = self._kept[-1] if self._kept else None
        if before is None or before.reduce is None:
            return None
        start, end, nbytes, _, choice = before.reduce
        exposed = None
        if self._between.is_nothing and records.ops:
            computed = max((op.end for op in before.ops), default=start)
            usual = {(edge.source, edge.destination): edge.estimate.flight for edge in edges}
            exposed = exposed_seconds(start, end, computed, ready, self._first.arrival(usual))
        self._kept[-1] = replace(before, reduce=before.reduce._replace(exposed=exposed))
        return ReduceTimes(before.step, end - start, exposed, nbytes, choice)

    def _measure_update(self, records: StepRecords, ready: float) -> float | None:
        """Return the seconds between the last op of the step before these records and the rank's readiness for them."""
        before = self._kept[-1] if self._kept else None
        if before is None or not (self._between.is_nothing and before.ops and records.ops):
            return None
        return max(ready - max(op.end for op in before.ops), 0.0)

    def _stall_tracker(self, edge: tuple[int, int], shape: int) -> StallTracker:
        tracker = self._stalling.setdefault((*edge, shape), StallTracker())
        self._stalling.move_to_end((*edge, shape))
        while len(self._stalling) > _KEPT_TRACKERS:
            self._stalling.popitem(last=False)
        return tracker

    def _measure_edges(
        self, records: StepRecords, waits: Sequence[tuple[Op, float]], shape: int
    ) -> tuple[EdgeMeasurement, ...]:
        messages: dict[tuple[int, int], list[MessageRecord]] = {}
        for message in sorted(records.messages, key=lambda message: message.sent_at):
            if message.replica is None:  # other links are not edges of this replica
                messages.setdefault((message.source, message.destination), []).append(message)
        waiting = dict.fromkeys(messages, 0.0)
        for op, seconds in waits:
            edge = (op.stage - 1 if op.kind is Kind.F else op.stage + 1, op.stage)
            waiting[edge] = waiting.get(edge, 0.0) + seconds
        measurements: list[EdgeMeasurement] = []
        for edge, mine in sorted(messages.items()):
            known: list[tuple[float, float]] = []
            awaited: list[tuple[float, float]] = []
            for message in mine:
                may_have_waited = message.sent_at < max(records.start, message.departed_at)
                (awaited if may_have_waited else known).append((message.departed_at, message.arrived_at))
            stalls, prompt = self._stall_tracker(edge, shape).observe(known, awaited)
            probe = self._probes.get(edge)
            if probe is not None and any(message.sent_at <= probe[0] < message.arrived_at for message in mine):
                probe = None  # it may have queued behind that message
            estimate = estimate_edge(prompt, probe)
            if estimate.occupancy is not None:
                self._occupancies[edge] = estimate.occupancy
            measurements.append(EdgeMeasurement(*edge, len(mine), waiting[edge], estimate, stalls))
        # Edges whose messages take other routes. A probe alone tells of the latency, and nothing of the rate.
        alone = {edge: EdgeEstimate(arrived - left, None, None) for edge, (left, arrived) in self._probes.items()} | self._rates
        measurements += [EdgeMeasurement(*edge, 0, 0.0, one) for edge, one in sorted(alone.items()) if edge not in messages]
        return tuple(measurements)


def _durations(records: StepRecords) -> dict[tuple[int, Kind], list[float]]:
    """Return the durations of ops in seconds, by stage and kind."""
    durations: dict[tuple[int, Kind], list[float]] = {}
    for op, start, end in records.ops:
        durations.setdefault((op.stage, op.kind), []).append(end - start)
    return durations


def _interval(rank: int, reduce: ReduceRecord, zero: float) -> ReduceInterval:
    start, end = reduce.start - zero, reduce.end - zero
    # Differences of rounded times may be less than the exposed part by a rounding.
    exposed = None if reduce.exposed is None else min(reduce.exposed, end - start)
    return ReduceInterval(rank, start, end, reduce.nbytes, exposed, None if reduce.choice is None else str(reduce.choice))


def merge_timelines(
    program: Program, records: Iterable[StepRecords], worker_of: Callable[[int], int] | None = None, *, joined: bool = False
) -> Timeline:
    """Merge the records of a step into one measured timeline, in seconds since the start of the first rank.

    Args:
        program: The program that ran.
        records: The step's records, one per rank. Ranks without records have no ops.
        worker_of: Returns the worker of a rank of the pipeline. Workers are the rows of a program of several replicas.
        joined: Whether each replica ran a program of one pipeline of its own, which the program joins.

    Raises:
        ValueError: The records are of several steps, or name a rank twice or one that the program does not have.
    """
    by_rank: dict[int, StepRecords] = {}
    for rank_records in records:
        if worker_of is not None and not program.is_one_pipeline:
            rank_records = replace(rank_records, rank=worker_of(rank_records.rank))
        if rank_records.rank in by_rank or not rank_records.rank < program.ranks:
            raise ValueError(
                f"records of rank {rank_records.rank}: expected each of the ranks 0..{program.ranks - 1} at most once"
            )
        by_rank[rank_records.rank] = rank_records
    steps = sorted({one.step for one in by_rank.values()})
    if len(steps) != 1:
        raise ValueError(f"records of the steps {steps}: expected those of one step")
    zero = min(one.start for one in by_rank.values())
    homes = {rank: program.routing.replica_of(rank) for rank in by_rank}
    ops = tuple(
        tuple(
            OpInterval(rank, replace(op, replica=homes[rank]) if joined else op, start - zero, end - zero)
            for op, start, end in by_rank[rank].ops
        )
        if rank in by_rank
        else ()
        for rank in range(program.ranks)
    )
    messages = sorted(
        (
            MessageInterval(
                *(m.kind, m.source, m.destination, m.microbatch),
                # Clocks of ranks differ by a little, so a short flight may seem to end before its begin.
                *(m.sent_at - zero, m.departed_at - zero, max(m.departed_at, m.arrived_at) - zero),
                homes[rank] if m.replica is None else m.replica,
            )
            for rank, one in by_rank.items()
            for m in one.messages
        ),
        key=lambda message: message.posted,
    )
    reduces = tuple(_interval(rank, one.reduce, zero) for rank, one in sorted(by_rank.items()) if one.reduce is not None)
    return Timeline(program, Source.MEASURED, ops, tuple(messages), 1.0, reduces)
