"""What a picture shows of one pipeline's step, of a step of several replicas, or of several simulated steps of these.

Ops of one pipeline have the colour of their kind. Those of several replicas have the colour of their home, the replica whose
microbatch they compute. The darker it is, the earlier comes their kind: F, then I, then W.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Literal, NamedTuple

from adaptra.program import Kind
from adaptra.report.drawing import GAP, LANE, REDUCE, TEXT, Box, lighter
from adaptra.report.job_rows import MOST_ROWS, job_rows
from adaptra.report.text import bubble_ratio, duration, origin, percent
from adaptra.simulation.simulate import Simulation
from adaptra.simulation.standing_out import slow_in, slow_links_of
from adaptra.simulation.timeline import MessageInterval, OpInterval, Timeline
from adaptra.simulation.worker_steps import SLOW_PACE, WorkerStep, is_foreign, paces, worker_steps

COLOURS: Final = {Kind.F: "#2F78B7", Kind.I: "#F2A93B", Kind.W: "#8FD3BF", Kind.B: "#C8502B"}
"""One colour per compute kind. They differ without red-green vision; in grey, F and B differ from I and W."""

HOMES: Final = ("#2F78B7", "#C8611F", "#3E8E5A", "#A53C8F", "#8F7A12", "#B23A48", "#1F8A8F", "#6B5B9E")
"""One colour per replica; the ninth has the first again."""

UPDATES: Final = {Kind.REDUCE: "#B9BCC4", Kind.STEP: "#4A4D55"}
MESSAGE: Final = "#A53C8F"
STEPS_SHOWN: Final = 3
_FOREIGN_EDGE: Final = "#111111"
_OWN_MESSAGE: Final = "#8A8D95"
_SLOW: Final = "#B3261E"
_FAINT: Final = "#6B6E76"
_SHADE: Final = {Kind.F: 0, Kind.B: 0, Kind.I: 1, Kind.W: 2}
_WHITE_ON: Final = (Kind.F, Kind.B, Kind.STEP)
_Style = Literal["solid"] | tuple[float, tuple[float, ...]]
_DASHES: Final = (0, (2.5, 1))

# Inches, as everything below that is not a time.
_SLOW_GAP, _REPLICA_GAP, _NOTE = 0.46, 0.2, 0.22


class Key(NamedTuple):
    """An entry of the legend, a box or a line. Entries stand by group and number."""

    group: int
    number: int
    label: str
    colour: str
    edge: str | None = None
    line: float = 0.0
    alpha: float = 1.0
    style: _Style = "solid"
    marker: str = ""


_KINDS: Final = {
    kind: Key(0, number, f"{kind.value} {meaning}", COLOURS[kind])
    for number, (kind, meaning) in enumerate(
        {Kind.F: "forward", Kind.I: "input gradient", Kind.W: "weight gradient", Kind.B: "both gradients"}.items()
    )
}
_SHADES: Final = {
    Kind.F: Key(1, 0, "dark: F forward", "#666666"),
    Kind.I: Key(1, 1, "lighter: I input gradient", lighter("#666666", 1)),
    Kind.W: Key(1, 2, "lightest: W weight gradient", lighter("#666666", 2)),
    **{kind: Key(1, 3 + number, kind.value, colour) for number, (kind, colour) in enumerate(UPDATES.items())},
}
_WAITING: Final = Key(2, 0, "waiting", "white", "#9A9DA5")
_FOREIGN: Final = Key(2, 1, "outlined: another replica's", "white", _FOREIGN_EDGE)
_REDUCED: Final = Key(2, 2, "REDUCE over replicas", lighter(REDUCE, 1))
_EXPOSED: Final = Key(2, 3, "REDUCE, exposed", REDUCE)
_LATER_STAGES: Final = Key(4, 0, "lighter: the rank's later stages", lighter(COLOURS[Kind.F], 1))


class Lines(NamedTuple):
    """Messages that are drawn alike, from (time, place) to (time, place)."""

    ends: Sequence[tuple[tuple[float, float], tuple[float, float]]]
    colours: Sequence[str] | str
    width: float
    alpha: float | None = None
    style: _Style = "solid"
    order: float = 2.0
    arrows: bool = False


class Note(NamedTuple):
    """A text beside the lanes."""

    place: float
    text: str
    size: float
    colour: str
    weight: str = "bold"


class Inside(NamedTuple):
    """A text at a time, above a place."""

    time: float
    place: float
    text: str
    size: float
    side: str


class Lane(NamedTuple):
    """A row: place, name, boxes in groups, narrow bars behind them (start, length, colour), and whether its worker is lost."""

    place: float
    name: str
    boxes: Sequence[Sequence[Box]]
    bars: Sequence[tuple[float, float, str]] = ()
    lost: bool = False


@dataclass(frozen=True)
class Panel:
    """A panel of a picture. Times are as the axis shows them, and places are inches from its top.

    Attributes:
        title: Its title.
        heading: What its heading says before and after the change against the first panel.
        left: Inches for the names of its rows.
        lanes: Its rows.
        height: Its height in inches.
        end: Where lanes end.
        axis: The name of the time axis.
        microbatches: The number of microbatches.
        keys: The entries of the legend for what it shows.
        lines: Messages.
        notes: Texts beside the lanes.
        inside: Texts between the lanes.
        gaps: Where marked gaps between lanes begin and end.
        period: The period to mark at the end; None for a single step.
    """

    title: str
    heading: tuple[str, str]
    left: float
    lanes: tuple[Lane, ...]
    height: float
    end: float
    axis: str
    microbatches: int
    keys: frozenset[Key]
    lines: tuple[Lines, ...] = ()
    notes: tuple[Note, ...] = ()
    inside: tuple[Inside, ...] = ()
    gaps: tuple[tuple[float, float], ...] = ()
    period: float | None = None

    @property
    def compared(self) -> float:
        """What is compared with the first panel."""
        return self.end if self.period is None else self.period

    @property
    def last(self) -> float:
        """The end of the last op or sum over replicas."""
        return max((self.end, *(start + length for lane in self.lanes for start, length, _ in lane.bars)))


class _Clock(NamedTuple):
    """Where times are on the axis: from a zero, and in milliseconds if the unit is known, else in the case's own unit."""

    zero: float
    scale: float

    def at(self, time: float) -> float:
        return (time - self.zero) * self.scale

    @staticmethod
    def of(timeline: Timeline) -> _Clock:
        return _Clock(origin(timeline), 1e3 * (timeline.seconds_per_unit or 1e-3))


def panel_of(title: str, shown: Timeline | Simulation, slow: frozenset[tuple[int, int]]) -> Panel:
    """Return the panel of a step; of a simulated job it shows the first steps. Slow edges are marked in one pipeline."""
    if isinstance(shown, Simulation):
        if not shown.case.is_one_pipeline:
            return _of_steps(title, shown)
        shown = shown.timeline
    return _of_pipeline(title, shown, slow_in(shown, slow)) if shown.program.is_one_pipeline else _of_job(title, shown)


def colour_of(home: int, kind: Kind) -> str:
    """Return the colour of an op of a kind, for a microbatch of the replica ``home``."""
    return UPDATES[kind] if kind.is_update else lighter(HOMES[home % len(HOMES)], _SHADE[kind])


def _of_pipeline(title: str, timeline: Timeline, slow: frozenset[tuple[int, int]]) -> Panel:
    placement, clock = timeline.program.placement, _Clock.of(timeline)
    marked: dict[int, list[str]] = {}
    for source, destination in sorted(slow):
        if max(source, destination) >= len(placement) or abs(placement[source] - placement[destination]) != 1:
            continue
        names = marked.setdefault(min(placement[source], placement[destination]), [])
        if f"{destination}→{source}" in names:
            names[names.index(f"{destination}→{source}")] = f"{destination}⇄{source}"
        else:
            names.append(f"{source}→{destination}")
    order_on_rank = [placement[:stage].count(rank) for stage, rank in enumerate(placement)]

    def box(interval: OpInterval) -> Box:
        op, later = interval.op, order_on_rank[interval.op.stage]
        ink = "white" if op.kind in _WHITE_ON and not later else "black"
        length = (interval.end - interval.start) * clock.scale
        return Box(clock.at(interval.start), length, lighter(COLOURS[op.kind], later), ink, str(op.microbatch))

    lanes: dict[int, float] = {}
    names_of: dict[int, str] = {}
    boxes: dict[int, list[list[Box]]] = {}
    gaps: list[tuple[float, float]] = []
    notes: list[Note] = []
    place = GAP
    for rank, order in enumerate(timeline.ops):
        stages = [stage for stage, holder in enumerate(placement) if holder == rank]
        names_of[rank] = f"rank {rank}" if stages == [rank] else f"rank {rank} ({'+'.join(map(str, stages))})"
        boxes[rank] = [[box(one) for one in order if one.op.kind is kind] for kind in COLOURS]
        lanes[rank] = place
        place += LANE
        if rank in marked:
            gaps.append((place, place + _SLOW_GAP))
            notes.append(Note(place + _SLOW_GAP / 2, "slow " + "\n".join(marked[rank]), 8, MESSAGE))
        place += _SLOW_GAP if rank in marked else GAP
    keys = {_WAITING, *(_KINDS[interval.op.kind] for interval in timeline)}
    if timeline.messages:
        keys.add(Key(3, 0, "message", MESSAGE, line=0.9, alpha=0.6))
    if slow:
        keys.add(Key(3, 1, "message on a slow edge", MESSAGE, line=1.4, marker=">"))
    if timeline.program.ranks < timeline.program.stages:
        keys.add(_LATER_STAGES)
    late = [one for one in timeline.messages if (one.source, one.destination) in slow]
    usual = [one for one in timeline.messages if (one.source, one.destination) not in slow]
    panel = _of_timeline(title, timeline, lanes, names_of, boxes)
    return replace(
        panel,
        left=0.95,
        height=place,
        keys=panel.keys | keys,
        lines=(
            Lines(_ends(timeline, lanes, usual), MESSAGE, 0.7, 0.55),
            Lines(_ends(timeline, lanes, late), MESSAGE, 1.0, arrows=True),
        ),
        notes=tuple(notes),
        gaps=tuple(gaps),
    )


def _of_job(title: str, timeline: Timeline) -> Panel:
    steps, clock, program = worker_steps(timeline), _Clock.of(timeline), timeline.program
    relative = paces(steps)
    shown = _shown(steps, relative)
    tops, height = _lanes([one.replica for one in shown], GAP)
    lanes = {one.worker: lane for one, lane in zip(shown, tops, strict=True)}
    boxes = {worker: _of_homes(timeline.ops[worker], program.routing.replica_of(worker), clock) for worker in lanes}
    names = {one.worker: one.name for one in shown}
    notes: list[Note] = []
    for step in shown:
        lane, pace = lanes[step.worker], relative.get(step.worker, 1.0)
        slow = pace >= SLOW_PACE
        label = f"{step.name} · {pace:.1f}× slow" if slow else step.name
        notes.append(Note(lane + 0.1, label, 9.0, _SLOW if slow else TEXT))
        if step.waits:
            whom, seconds = step.waits[0]
            text = f"waits for {names.get(whom, f'worker {whom}')}: {duration(timeline, seconds)}"
            notes.append(Note(lane + 0.235, text, 6.8, _FAINT, "normal"))
    keys = _keys_of_homes((is_foreign(program, one), one) for worker in lanes for one in timeline.ops[worker])
    late_links = slow_links_of(timeline)
    crossing = {one for one in timeline.messages if _crosses(timeline, one)}
    if timeline.messages:
        keys.add(Key(3, 0, "message", _OWN_MESSAGE, line=0.9))
    if crossing:
        keys.add(Key(3, 1, "crosses replicas", colour_of(0, Kind.F), line=1.4))
    if late_links:
        keys.add(Key(3, 2, "on a slow link", MESSAGE, line=2.0, style=_DASHES))
    seen = [one for one in timeline.messages if all(end in lanes for end in timeline.ends_of(one))]
    late, own, foreign = (
        [one for one in seen if timeline.ends_of(one) in late_links],
        [one for one in seen if one not in crossing],
        [one for one in seen if one in crossing],
    )
    hidden = len({one.replica for one in steps}) - len({one.replica for one in shown})
    panel = _of_timeline(title, timeline, lanes, {}, boxes)
    return replace(
        panel,
        left=1.75,
        height=height + (_NOTE if hidden else 0.0),
        keys=panel.keys | keys,
        lines=(
            Lines(_ends(timeline, lanes, late), MESSAGE, 2.0, style=_DASHES, order=2.2),
            Lines(_ends(timeline, lanes, own), _OWN_MESSAGE, 0.7, 0.7),
            Lines(_ends(timeline, lanes, foreign), [colour_of(one.replica, Kind.F) for one in foreign], 1.3, 0.95),
        ),
        notes=tuple(notes),
        inside=_more(hidden, height),
    )


def _of_steps(title: str, simulated: Simulation) -> Panel:
    """Return the panel of the first steps of a job, in which one replica stands for all that are alike."""
    shown, case = job_rows(simulated), simulated.case
    tops, height = _lanes([row.replica for row in shown.rows], GAP / 2)
    orders = [[*chain.from_iterable(row.steps[:STEPS_SHOWN])] for row in shown.rows]
    end = max((order[-1].end for order in orders if order), default=0.0)
    inside: list[Inside] = []
    for replica, number in shown.stands_for.items():
        if number > 1:
            lane = next(lane for lane, row in zip(tops, shown.rows, strict=True) if row.replica == replica)
            inside.append(Inside(end, lane - 0.02, f"stands for {number} replicas", 8, "right"))
    counts = {"lost": len(case.lost), "slow": len(case.slow), "links of their own": len(case.links)}
    state = ", ".join(f"{number} {what}" for what, number in counts.items() if number) or "none lost or slow"
    return Panel(
        title,
        (
            f"{case.workers} workers, {state} · period {simulated.period:.6g}",
            f" · at most {max(simulated.held)} in flight",
        ),
        1.35,
        tuple(
            Lane(lane, row.name, _of_homes(order, row.replica, _Clock(0.0, 1.0)), lost=row.lost)
            for lane, row, order in zip(tops, shown.rows, orders, strict=True)
        ),
        height + (_NOTE if shown.hidden else 0.0),
        end,
        "time (the case's unit)",
        case.microbatches,
        frozenset(
            _keys_of_homes(
                (one.op.replica != row.replica, one) for row, order in zip(shown.rows, orders, strict=True) for one in order
            )
        ),
        inside=(*inside, *_more(shown.hidden, height)),
        period=simulated.period,
    )


def _of_timeline(
    title: str,
    timeline: Timeline,
    lanes: Mapping[int, float],
    names: Mapping[int, str],
    boxes: Mapping[int, Sequence[Sequence[Box]]],
) -> Panel:
    """Return the panel of a step with its heading, rows and sums over replicas, for ranks that have a lane."""
    clock = _Clock.of(timeline)
    bars: dict[int, list[tuple[float, float, str]]] = {rank: [] for rank in lanes}
    for reduce in timeline.reduces:
        turn = reduce.end - (reduce.exposed or 0.0)
        for start, end, colour in ((reduce.start, turn, lighter(REDUCE, 1)), (turn, reduce.end, REDUCE)):
            if end > start and reduce.rank in bars:
                bars[reduce.rank].append((clock.at(start), (end - start) * clock.scale, colour))
    keys = {_REDUCED} if timeline.reduces else set[Key]()
    if any(reduce.exposed for reduce in timeline.reduces):
        keys.add(_EXPOSED)
    return Panel(
        title,
        (
            f"{timeline.source.value} · makespan {duration(timeline, timeline.makespan)}",
            f" · bubble {percent(bubble_ratio(timeline))}",
        ),
        0.0,
        tuple(Lane(lane, names.get(rank, ""), boxes[rank], bars[rank]) for rank, lane in lanes.items()),
        0.0,
        timeline.makespan * clock.scale,
        "time (ms)" if timeline.seconds_per_unit else "time (the case's unit)",
        timeline.program.microbatches,
        frozenset(keys),
    )


def _ends(
    timeline: Timeline, lanes: Mapping[int, float], messages: Iterable[MessageInterval]
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return each message's line: from the border of the sender's lane that faces the receiver's, and vice versa."""
    clock, lines = _Clock.of(timeline), list[tuple[tuple[float, float], tuple[float, float]]]()
    for message in messages:
        source, destination = (lanes[end] for end in timeline.ends_of(message))
        down = source < destination
        lines.append(
            (
                (clock.at(message.departed), source + (LANE if down else 0.0)),
                (clock.at(message.arrived), destination + (0.0 if down else LANE)),
            )
        )
    return lines


def _crosses(timeline: Timeline, message: MessageInterval) -> bool:
    """Return whether a message leaves its home: another replica's worker sends or receives it."""
    routing = timeline.program.routing
    return any(routing.replica_of(end) != message.replica for end in timeline.ends_of(message))


def _of_homes(order: Iterable[OpInterval], own: int, clock: _Clock) -> list[list[Box]]:
    """Return the boxes of a row of replica ``own``: its microbatches', and those of others with a line around them."""
    groups: list[list[Box]] = [[], []]
    for interval in order:
        op, length, is_other = interval.op, (interval.end - interval.start) * clock.scale, interval.op.replica != own
        if length > 0:
            ink, edge = "white" if op.kind in _WHITE_ON else "black", _FOREIGN_EDGE if is_other else "white"
            text = op.kind.value if op.kind.is_update else str(op.microbatch)
            groups[is_other].append(Box(clock.at(interval.start), length, colour_of(op.replica, op.kind), ink, text, edge))
    return groups


def _keys_of_homes(drawn: Iterable[tuple[bool, OpInterval]]) -> set[Key]:
    """Return the entries for ops and whether each is another replica's: their replicas and kinds, and the line around those."""
    seen = [(is_other, one.op) for is_other, one in drawn if one.end > one.start]
    homes = sorted({op.replica for _, op in seen if not op.kind.is_update})
    keys = {Key(0, home, f"replica {home}", colour_of(home, Kind.F)) for home in homes[: len(HOMES)]}
    keys |= {_SHADES[op.kind] for _, op in seen if op.kind in _SHADES}
    return keys | ({_FOREIGN} if any(is_other for is_other, _ in seen) else set())


def _lanes(replicas: Sequence[int], gap: float) -> tuple[list[float], float]:
    """Return where the lanes of workers of these replicas begin, and where the last ends."""
    lanes: list[float] = []
    place = GAP
    for replica, before in zip(replicas, (*replicas[:1], *replicas), strict=False):
        place += _REPLICA_GAP if replica != before else 0.0
        lanes.append(place)
        place += LANE + gap
    return lanes, place


def _more(hidden: int, height: float) -> tuple[Inside, ...]:
    return (Inside(0.0, height + _NOTE - 0.04, f"and {hidden} replicas more", 9, "left"),) if hidden else ()


def _shown(steps: Sequence[WorkerStep], relative: Mapping[int, float]) -> tuple[WorkerStep, ...]:
    """Return the workers of the replicas that fit, in order: first those whose workers share, then those with slow ones."""
    by_replica: dict[int, list[WorkerStep]] = {}
    for one in sorted(steps, key=lambda each: (each.replica, each.stages)):
        by_replica.setdefault(one.replica, []).append(one)

    def weight(replica: int) -> tuple[bool, float, int]:
        mine = by_replica[replica]
        return not any(one.taken or one.given for one in mine), -max(relative.get(one.worker, 1.0) for one in mine), replica

    kept: list[int] = []
    for replica in sorted(by_replica, key=weight):
        if kept and sum(len(by_replica[one]) for one in (*kept, replica)) > MOST_ROWS:
            break
        kept.append(replica)
    return tuple(one for replica in sorted(kept) for one in by_replica[replica])
