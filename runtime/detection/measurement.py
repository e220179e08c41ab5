"""The small vector that a rank reports after a step: how long its ops took and how its incoming messages travelled.

All times are seconds. ``sent`` and ``arrived`` of a message must be read from one clock: on one host that is the monotonic
clock; between hosts the difference that their clocks had at the start must have been taken out, and
:mod:`adaptra.runtime.detection.clock_drift` follows them from there. ``arrived`` is when the message was there, not when
somebody looked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final

from adaptra.runtime.control_store.schema import Fields

FITTED_MESSAGES: Final = 64
"""The estimate of an edge looks at the first so many messages of a step; its cost stays bounded."""

FITTED_OCCUPANCIES: Final = 12
"""How many occupancies the estimate tries."""

LATE_PAIRS: Final = 8
"""One in so many pairs of arrivals may be closer than the edge lets messages follow."""

RESOLUTION: Final = 50e-6
"""Seconds per message that queueing must explain before it counts as seen."""


@dataclass(frozen=True, slots=True)
class StageMeasurement:
    """Median durations of one stage's ops in one step; None for kinds that did not run. ``both`` is that of B."""

    stage: int
    forward: float | None
    input_grad: float | None
    weight_grad: float | None
    both: float | None

    @property
    def backward(self) -> float | None:
        """I and W together, or B."""
        if self.input_grad is not None and self.weight_grad is not None:
            return self.input_grad + self.weight_grad
        return self.both


@dataclass(frozen=True, slots=True)
class EdgeEstimate:
    """What the flights of one step say about a directed edge.

    Attributes:
        flight: From handing a message over to its arrival when no other message is before it: occupancy + latency. Read from
            two clocks, so that it is below zero where the receiver's has fallen behind by more.
        occupancy: How long a message occupies the edge; None when no messages queued and no probe told, so that it could not be
            seen.
        spacing: How closely messages arrived behind each other, an upper bound of the occupancy: an eighth of the pairs is
            closer, such as two of which the first was late. None for a single message.
    """

    flight: float
    occupancy: float | None
    spacing: float | None


@dataclass(frozen=True, slots=True)
class Stalls:
    """What the path of an edge held up in one step; see :mod:`adaptra.runtime.detection.stalls`.

    Attributes:
        count: How many messages stalled.
        late: How many were late: those and the ones behind them.
        lateness: By how many seconds all of these together.
    """

    count: int = 0
    late: int = 0
    lateness: float = 0.0


@dataclass(frozen=True, slots=True)
class EdgeMeasurement:
    """One incoming directed edge in one step: its estimate, its messages, how long ops waited for them, and its stalls."""

    source: int
    destination: int
    messages: int
    waiting: float
    estimate: EdgeEstimate
    stalls: Stalls = Stalls()


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """What one rank measured in one step.

    Attributes:
        rank: The rank that measured.
        step: The step's number.
        seconds: From the step's start to its end on this rank.
        stages: The rank's stages.
        edges: The directed edges that end at the rank's stages and start at another rank's.
        pause: By how much one op took longer than is usual for its kind, at most: a garbage collection, a busy machine.
    """

    rank: int
    step: int
    seconds: float
    stages: tuple[StageMeasurement, ...]
    edges: tuple[EdgeMeasurement, ...]
    pause: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The JSON object that :meth:`from_json` reads back to an equal measurement."""
        return {
            "rank": self.rank,
            "step": self.step,
            "seconds": self.seconds,
            "stages": [
                {"stage": m.stage, "F": m.forward, "I": m.input_grad, "W": m.weight_grad, "B": m.both} for m in self.stages
            ],
            "edges": [
                {
                    "source": m.source,
                    "destination": m.destination,
                    "messages": m.messages,
                    "waiting": m.waiting,
                    "flight": m.estimate.flight,
                    "occupancy": m.estimate.occupancy,
                    "spacing": m.estimate.spacing,
                    "stalls": m.stalls.count,
                    "late": m.stalls.late,
                    "lateness": m.stalls.lateness,
                }
                for m in self.edges
            ],
            "pause": self.pause,
        }

    @staticmethod
    def from_json(data: object) -> StepMeasurement:
        """Read a measurement.

        Raises:
            ControlError: A field is missing, unknown or not what it should be.
        """
        fields = Fields(data, "measurement")
        measurement = StepMeasurement(
            rank=fields.whole("rank"),
            step=fields.whole("step"),
            seconds=fields.number("seconds"),
            stages=tuple(map(_read_stage, fields.objects("stages"))),
            edges=tuple(map(_read_edge, fields.objects("edges"))),
            pause=fields.number("pause"),
        )
        fields.end()
        return measurement


def _read_stage(fields: Fields) -> StageMeasurement:
    stage = fields.whole("stage")
    measurement = StageMeasurement(stage, *map(fields.number_or_none, ("F", "I", "W", "B")))
    fields.end()
    return measurement


def _read_edge(fields: Fields) -> EdgeMeasurement:
    source, destination = fields.whole("source"), fields.whole("destination")
    messages, waiting = fields.whole("messages", at_least=1), fields.number("waiting")
    estimate = EdgeEstimate(fields.instant("flight"), fields.number_or_none("occupancy"), fields.number_or_none("spacing"))
    stalls = Stalls(fields.whole("stalls"), fields.whole("late"), fields.number("lateness"))
    fields.end()
    return EdgeMeasurement(source, destination, messages, waiting, estimate, stalls)


def arrival_spacings(flights: Iterable[tuple[float, float]]) -> list[float]:
    """The seconds between each two arrivals that follow each other, shortest first."""
    arrivals = sorted(arrived for _, arrived in flights)
    return sorted(later - earlier for earlier, later in pairwise(arrivals))


def usual_spacing(spacings: Sequence[float]) -> float | None:
    """How closely messages arrive behind each other: an eighth of these spacings is shorter. None of none."""
    return spacings[len(spacings) // LATE_PAIRS] if spacings else None


def estimate_edge(flights: Sequence[tuple[float, float]], probe: tuple[float, float] | None = None) -> EdgeEstimate:
    """Tell an edge's latency from its occupancy.

    The cost model says that message k departs at ``max(sent_k, departed_(k-1) + occupancy)`` and arrives ``occupancy +
    latency`` later. For a given occupancy the latency is the median of what is left of the arrivals. Occupancies are tried
    among the spacings of the arrivals, since queued messages arrive one occupancy apart; the one whose latencies scatter least
    wins, but only if it halves the scatter that a flight without queueing leaves, and a probe of a few bytes took hardly longer
    than the latency it leaves: messages that were sent one occupancy apart look the same. If none does, no message queued. What
    the probe took is then the latency, and the rest of the flights' median the occupancy; without one the median is all there
    is to know.

    Args:
        flights: ``(sent, arrived)`` per message, at least one, in any order.
        probe: ``(sent, arrived)`` of a message of a few bytes that no other message on the edge was before.
    """
    ordered = sorted(flights)[:FITTED_MESSAGES]
    spacings = arrival_spacings(ordered)
    unqueued, latency = _scatter(ordered, 0.0)
    probed = None if probe is None else probe[1] - probe[0]
    alone = EdgeEstimate(latency, None if probed is None else max(latency - probed, 0.0), usual_spacing(spacings))
    if not spacings:
        return alone
    stride = max(1, len(spacings) // FITTED_OCCUPANCIES)
    best = min(spacings[::stride], key=lambda occupancy: _scatter(ordered, occupancy)[0])
    occupancy = _queued_spacing(ordered, best)
    scatter, behind = _scatter(ordered, occupancy)
    gained = (unqueued - scatter) / len(ordered)
    is_refuted = probed is not None and probed - behind > 0.5 * occupancy
    if occupancy > 0 and scatter < 0.5 * unqueued and gained > RESOLUTION and not is_refuted:
        return EdgeEstimate(occupancy + behind, occupancy, alone.spacing)
    return alone


def _scatter(flights: Sequence[tuple[float, float]], occupancy: float) -> tuple[float, float]:
    """The sum of absolute deviations of the latencies that an occupancy leaves, and their median."""
    latencies: list[float] = []
    free = float("-inf")
    for sent, arrived in flights:
        free = max(sent, free) + occupancy
        latencies.append(arrived - free)
    middle = median(latencies)
    return sum(abs(latency - middle) for latency in latencies), middle


def _queued_spacing(flights: Sequence[tuple[float, float]], occupancy: float) -> float:
    """The median spacing of the messages that would queue under ``occupancy``; less noisy than any single spacing."""
    spacings: list[float] = []
    free = float("-inf")
    before = 0.0
    for sent, arrived in flights:
        if sent < free:
            spacings.append(arrived - before)
        free = max(sent, free) + occupancy
        before = arrived
    return max(median(spacings), 0.0) if spacings else 0.0
