"""The small vector that a rank reports after a step: the durations of its ops and the flights of its incoming messages.

All times are seconds. ``sent`` and ``arrived`` of a message must be read from one clock. On one host that is the monotonic
clock. Between hosts the clocks' offset at the start must be subtracted; :mod:`adaptra.runtime.detection.clock_drift` corrects
later drift. ``arrived`` is the time at which the message was complete, not the time at which a thread noticed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final

from adaptra.collectives.choice import SumWay
from adaptra.collectives.late_ranks import SumChoice
from adaptra.json_files import Fields

FITTED_MESSAGES: Final = 64
"""The number of first messages of a step that the estimate of an edge uses, so that its cost stays bounded."""

FITTED_OCCUPANCIES: Final = 12
"""The number of occupancies that the estimate tries."""

LATE_PAIRS: Final = 8
"""The inverse of the tolerated share (1/8) of arrival pairs that are closer than the estimated occupancy."""

RESOLUTION: Final = 50e-6
"""Seconds per message that queueing must explain before the estimate accepts it."""


@dataclass(frozen=True, slots=True)
class StageMeasurement:
    """Median durations of one stage's ops in one step, seconds; None for kinds that did not run. ``both`` is that of B."""

    stage: int
    forward: float | None
    input_grad: float | None
    weight_grad: float | None
    both: float | None

    @property
    def backward(self) -> float | None:
        """The duration of I and W together, or of B."""
        if self.input_grad is not None and self.weight_grad is not None:
            return self.input_grad + self.weight_grad
        return self.both


@dataclass(frozen=True, slots=True)
class EdgeEstimate:
    """The estimate of a directed edge from the flights of one step.

    Attributes:
        flight: From the hand-over of a message to its arrival when no other message is before it: occupancy + latency. It is
            read from two clocks, so drift can make it negative.
        occupancy: The time for which a message occupies the edge; None if no messages queued and there was no probe.
        spacing: The spacing of arrivals, an upper bound of the occupancy; None for a single message. An eighth of the pairs is
            closer, for example when the first of two was late.
    """

    flight: float
    occupancy: float | None
    spacing: float | None


@dataclass(frozen=True, slots=True)
class Stalls:
    """The stalls of an edge in one step; see :mod:`adaptra.runtime.measuring.stalls`.

    Attributes:
        count: The number of messages that stalled.
        late: The number of late messages: the stalled ones and those behind them.
        lateness: The total delay of the late messages, seconds.
    """

    count: int = 0
    late: int = 0
    lateness: float = 0.0


@dataclass(frozen=True, slots=True)
class EdgeMeasurement:
    """One incoming directed edge in one step: its estimate, messages, stalls, and the seconds that ops waited for messages.

    Without messages the estimate is that of probes: the flight of a few bytes, or that of a rate probe and its occupancy.
    """

    source: int
    destination: int
    messages: int
    waiting: float
    estimate: EdgeEstimate
    stalls: Stalls = Stalls()


@dataclass(frozen=True, slots=True)
class ReduceTimes:
    """One rank's REDUCE: the sum over the replicas of its stages' gradients, at the end of a step.

    Attributes:
        step: The number of that step. The measurement of the next one tells of it, as only that shows the delay.
        seconds: The duration of the sum. In it the rank may wait for the other replicas.
        exposed: The seconds by which it delayed the rank's first op of the next step; None where not known.
        nbytes: The bytes of the gradients that were added.
        choice: How it was made, and when the replicas came to it; None where a job does not choose.
    """

    step: int
    seconds: float
    exposed: float | None
    nbytes: int
    choice: SumChoice | None = None


IF_MEASURED: Final = ("reduce", "update", "has_met")
"""The fields of a measurement that its JSON has only where there is something to say."""


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """The measurement of one step by one rank.

    Attributes:
        rank: The rank that measured.
        step: The step's number.
        seconds: From the step's start to its end on this rank.
        stages: The rank's stages.
        edges: The directed edges that end at the rank's stages and start at another rank's.
        pause: The largest excess of an op's duration over the median of its kind, seconds: a garbage collection, a busy
            machine.
        reduce: The rank's REDUCE at the end of the step before. None without other replicas, and in the first step.
        has_met: Whether the rank has met all others between the step before and this one.
        update: The seconds from the rank's last op of the step before until it was ready for this one. In them are its REDUCE,
            the user's optimizer and data. None if another call was between, or if ranks waited for each other.
    """

    rank: int
    step: int
    seconds: float
    stages: tuple[StageMeasurement, ...]
    edges: tuple[EdgeMeasurement, ...]
    pause: float = 0.0
    reduce: ReduceTimes | None = None
    has_met: bool = False
    update: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that :meth:`from_json` reads back to an equal measurement."""
        fields: dict[str, Any] = {
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
        if self.reduce is not None:
            fields["reduce"] = _reduce_to_json(self.reduce)
        if self.update is not None:
            fields["update"] = self.update
        return fields | ({"has_met": True} if self.has_met else {})

    @staticmethod
    def from_json(data: object) -> StepMeasurement:
        """Read a measurement.

        Raises:
            ControlError: A field is missing, unknown or invalid.
        """
        fields = Fields(data, "measurement")
        measurement = StepMeasurement(
            rank=fields.whole("rank"),
            step=fields.whole("step"),
            seconds=fields.number("seconds"),
            stages=tuple(map(_read_stage, fields.objects("stages"))),
            edges=tuple(map(_read_edge, fields.objects("edges"))),
            pause=fields.number("pause"),
            reduce=None if (reduce := fields.raw("reduce", None)) is None else _read_reduce(reduce),
            has_met=fields.flag("has_met", False),
            update=fields.number_if_there("update"),
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
    messages, waiting = fields.whole("messages"), fields.number("waiting")
    estimate = EdgeEstimate(fields.instant("flight"), fields.number_or_none("occupancy"), fields.number_or_none("spacing"))
    stalls = Stalls(fields.whole("stalls"), fields.whole("late"), fields.number("lateness"))
    fields.end()
    return EdgeMeasurement(source, destination, messages, waiting, estimate, stalls)


def _reduce_to_json(reduce: ReduceTimes) -> dict[str, Any]:
    fields = {"step": reduce.step, "seconds": reduce.seconds, "exposed": reduce.exposed, "bytes": reduce.nbytes}
    return fields if reduce.choice is None else fields | {"choice": choice_to_json(reduce.choice)}


def choice_to_json(choice: SumChoice) -> dict[str, Any]:
    """Return the JSON object that :func:`read_choice` reads back to an equal one."""
    return {
        "algorithm": choice.way.algorithm,
        "late": [*choice.way.late],
        **({"narrow": [*choice.way.narrow]} if choice.way.narrow else {}),
        "parts": choice.way.parts,
        "lateness": [*choice.lateness],
        "seconds": dict(choice.seconds),
        "wrong_guess": choice.wrong_guess,
    }


def read_choice(data: object) -> SumChoice:
    """Read how a sum was made.

    Raises:
        ControlError: A field is missing, unknown or invalid.
    """
    fields = Fields(data, "how a sum was made")
    parts = fields.whole("parts", at_least=1)
    way = SumWay(fields.text("algorithm", at_most=16), fields.wholes("late"), parts, fields.wholes("narrow", ()))
    lateness = fields.numbers("lateness", len(fields.items("lateness")))
    choice = SumChoice(way, lateness, tuple(fields.numbers_by_name("seconds").items()), fields.number("wrong_guess"))
    fields.end()
    return choice


def _read_reduce(data: object) -> ReduceTimes:
    fields = Fields(data, "measurement: reduce")
    seconds, exposed = fields.number("seconds"), fields.number_or_none("exposed")
    choice = None if (found := fields.raw("choice", None)) is None else read_choice(found)
    reduce = ReduceTimes(fields.whole("step"), seconds, exposed, fields.whole("bytes"), choice)
    if exposed is not None and exposed > seconds:
        raise fields.refuse("exposed", f"at most seconds={seconds}", exposed)
    fields.end()
    return reduce


def arrival_spacings(flights: Iterable[tuple[float, float]]) -> list[float]:
    """Return the seconds between consecutive arrivals, shortest first."""
    arrivals = sorted(arrived for _, arrived in flights)
    return sorted(later - earlier for earlier, later in pairwise(arrivals))


def usual_spacing(spacings: Sequence[float]) -> float | None:
    """Return the spacing of arrivals of which an eighth is shorter, seconds; None if there are none."""
    return spacings[len(spacings) // LATE_PAIRS] if spacings else None


def estimate_edge(flights: Sequence[tuple[float, float]], probe: tuple[float, float] | None = None) -> EdgeEstimate:
    """Estimate an edge's latency and occupancy.

    In the cost model, message k departs at ``max(sent_k, departed_(k-1) + occupancy)`` and arrives ``occupancy + latency``
    later. For a given occupancy, the latency is the median of the remaining delay.

    Queued messages arrive one occupancy apart, so the spacings of the arrivals are tried as occupancies. The one whose
    latencies scatter least wins if it passes two tests. It must halve the scatter that remains without queueing. A probe must
    not take much longer than the remaining latency, because messages sent one occupancy apart would look the same.

    If none passes, no message queued. Then the probe's flight is the latency, and the rest of the median flight is the
    occupancy. Without a probe only the median flight is known.

    Args:
        flights: ``(sent, arrived)`` per message, at least one, in any order.
        probe: ``(sent, arrived)`` of a message of a few bytes that no other message on the edge preceded.
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
    """Return the sum of absolute deviations of the latencies that remain for an occupancy, and their median."""
    latencies: list[float] = []
    free = float("-inf")
    for sent, arrived in flights:
        free = max(sent, free) + occupancy
        latencies.append(arrived - free)
    middle = median(latencies)
    return sum(abs(latency - middle) for latency in latencies), middle


def _queued_spacing(flights: Sequence[tuple[float, float]], occupancy: float) -> float:
    """Return the median spacing of the messages that would queue under ``occupancy``, less noisy than any single spacing."""
    spacings: list[float] = []
    free = float("-inf")
    before = 0.0
    for sent, arrived in flights:
        if sent < free:
            spacings.append(arrived - before)
        free = max(sent, free) + occupancy
        before = arrived
    return max(median(spacings), 0.0) if spacings else 0.0
