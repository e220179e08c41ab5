"""Measurements of steps with batches of several shapes, as if all batches had one shape.

Ops and messages of a longer batch take longer, which is no change of a stage or link. So the detector gets the measurements of
other shapes in proportion. A rank learns that from its own steps, and tells nothing of a shape before it has.

The first shape that comes is the standard. For another one, a value is divided by what is estimated: an op by its relative
time, a message's occupancy by its relative bytes. Its latency does not depend on the shape. What remains is learned: the value
is compared with the last one of a known shape, some steps ago at most. A fault does not matter much, as both steps have it.

Shapes of very different sizes are left out, and so are messages much smaller than the standard's: what disturbs them would be
multiplied.

A shape is known once these comparisons scatter by far less than the least change that is detected, or as steps of known shapes
do. What was learned does not change any more, so a fault can't become usual.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from adaptra.runtime.detection.level_shift import DEVIATIONS, NINE_IN_TEN, DetectorOptions, median_deviation
from adaptra.runtime.measuring.measurement import EdgeMeasurement, StageMeasurement, StepMeasurement

COMPARISONS: Final = 8
"""The least number of comparisons with known shapes after which a shape is known."""

LAST_COMPARISONS: Final = 64
"""The number of last comparisons that count."""

AGO: Final = 32
"""The number of steps for which a value of a known shape can be compared with."""

SAFETY: Final = 4.0
"""How much less than the least change may be unsure of what was learned."""

LEAST_MESSAGE: Final = 0.75
"""The smallest messages that tell of an edge, relative to the standard's."""

MOST: Final = 4.0
"""How many times as long as the standard's the ops of a shape may take, or the standard's as its own; messages likewise."""

KEPT: Final = 256
"""The number of shapes that are remembered, the last used ones."""

_LEAST: Final = 1e-9
"""Seconds: times are not taken to be shorter, so that they have a logarithm."""

MEDIAN: Final = 1.2533
"""The standard error of a median, in units of that of a mean, of normal values."""


@dataclass(frozen=True, slots=True)
class RelativeSizes:
    """What is estimated of a shape, relative to the shape for which the pipeline was compiled.

    Attributes:
        ops: The time of each stage's ops, by stage.
        messages: The bytes of a message of each directed edge of stages.
    """

    ops: Mapping[int, float]
    messages: Mapping[tuple[int, int], float]


@dataclass(slots=True)
class _LearnedDifference:
    """One value of a shape: how it compares with known shapes."""

    comparisons: deque[float] = field(default_factory=lambda: deque[float](maxlen=LAST_COMPARISONS))
    compared_with: int = 0
    difference: float | None = None


@dataclass(slots=True)
class _ShapeScale:
    """What was learned of a shape: of every value, and the occupancies that were seen last."""

    steps: int = 0
    learned: dict[Hashable, _LearnedDifference] = field(default_factory=dict[Hashable, _LearnedDifference])
    occupancies: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])


@dataclass(slots=True)
class _KnownValues:
    """The values of known shapes, as if of one: the step of the last one, and recent ones."""

    step: int
    recent: deque[float]


class ShapeScales:
    """Converts the measurements of one rank's steps to the first shape that comes.

    Args:
        options: The thresholds of the detector.
    """

    def __init__(self, options: DetectorOptions | None = None) -> None:
        self._options = options or DetectorOptions()
        self._steps = 0
        self._standard: tuple[int, RelativeSizes] | None = None
        self._shapes: OrderedDict[int, _ShapeScale] = OrderedDict()
        self._known: dict[Hashable, _KnownValues] = {}

    def convert(self, shape: int, sizes: RelativeSizes, measured: StepMeasurement) -> StepMeasurement:
        """Return the measurement of a step as if its batch had been of the first shape.

        Stages and edges of which too little is known are left out.

        Args:
            shape: The code of the batch's shape.
            sizes: What is estimated of it.
            measured: The step's measurement.
        """
        self._steps += 1
        of = self._shapes.setdefault(shape, _ShapeScale())
        self._shapes.move_to_end(shape)
        while len(self._shapes) > KEPT:
            self._shapes.popitem(last=False)
        if self._standard is None:
            self._standard = shape, sizes
        of.steps += 1
        number, standard = self._standard
        is_first = shape == number
        ops = {one.stage: sizes.ops[one.stage] / standard.ops[one.stage] for one in measured.stages}
        messages = {edge: size / standard.messages[edge] for edge, size in sizes.messages.items() if edge in standard.messages}
        stages = [self._stage(of, one, ops[one.stage], is_first) for one in measured.stages]
        forward = max(((one.forward or 0.0) / ops[one.stage] for one in measured.stages), default=0.0)
        edges = [
            self._edge(of, one, messages.get((one.source, one.destination), 1.0), forward, is_first) for one in measured.edges
        ]
        seconds = self._seconds(of, max(ops.values(), default=1.0), measured.seconds, is_first)
        known = tuple(one for one in stages if one is not None), tuple(one for one in edges if one is not None)
        return replace(measured, seconds=seconds, stages=known[0], edges=known[1])

    def _seconds(self, of: _ShapeScale, relative: float, measured: float, is_first: bool) -> float:
        """Return the step's time; by estimates alone where nothing is learned, as only the steps' noise depends on it."""
        estimated = measured / relative
        change = self._difference(of, "seconds", math.log(max(estimated, _LEAST)), math.log1p(self._options.change), is_first)
        return estimated * math.exp(change or 0.0)

    def _stage(self, of: _ShapeScale, measured: StageMeasurement, relative: float, is_first: bool) -> StageMeasurement | None:
        backward = measured.backward
        if measured.forward is None or backward is None:
            return measured if is_first else None
        if not 1 / MOST <= relative <= MOST:
            return None
        total = (measured.forward + backward) / relative
        key = "stage", measured.stage
        # The logarithm of a ratio is a difference, as what is learned of an edge.
        change = self._difference(of, key, math.log(max(total, _LEAST)), math.log1p(self._options.change), is_first)
        if change is None:
            return None
        factor = math.exp(change) / relative
        times = (measured.forward, measured.input_grad, measured.weight_grad, measured.both)
        return StageMeasurement(measured.stage, *(None if one is None else one * factor for one in times))

    def _edge(
        self, of: _ShapeScale, measured: EdgeMeasurement, relative: float, forward: float, is_first: bool
    ) -> EdgeMeasurement | None:
        edge, estimate = (measured.source, measured.destination), measured.estimate
        if measured.messages == 0:
            return measured  # of probes, whose bytes do not depend on the shape
        if not LEAST_MESSAGE <= relative <= MOST:
            return None
        if estimate.occupancy is not None:
            of.occupancies[edge] = estimate.occupancy
        # Where none was measured, the last one holds, but a fault may have ended.
        occupancy = min(of.occupancies.get(edge, 0.0), max(estimate.flight, 0.0))
        flight = estimate.flight + occupancy * (1 / relative - 1)
        occupied = None if estimate.occupancy is None else estimate.occupancy / relative
        # The mean forward of all stages is taken to be at least half of this rank's.
        least = max(self._options.change * forward / 2, self._options.edge_change * abs(flight))
        later = self._difference(of, ("flight", edge), flight, least, is_first)
        if occupied is not None:
            longer = self._difference(of, ("occupancy", edge), occupied, least, is_first)
            if longer is None:
                return None
            occupied = max(occupied + longer, 0.0)
        if later is None:
            return None
        spacing = None if estimate.spacing is None else estimate.spacing / min(relative, 1.0)
        return replace(measured, estimate=replace(estimate, flight=flight + later, occupancy=occupied, spacing=spacing))

    def _difference(self, of: _ShapeScale, key: Hashable, value: float, least: float, is_first: bool) -> float | None:
        """Return what to add to a value of a shape, None if it is not known; and learn from the value.

        Args:
            of: The shape.
            key: What the value is of.
            value: The value, but for what is to be learned.
            least: The least change that is detected.
            is_first: Whether the shape is the standard.
        """
        learned = of.learned.setdefault(key, _LearnedDifference(difference=0.0 if is_first else None))
        if learned.difference is None:
            self._learn(learned, of.steps, key, value, least)
        if learned.difference is None or (is_first and of.steps <= self._options.warm_up):
            return learned.difference
        known = self._known.setdefault(key, _KnownValues(0, deque(maxlen=self._options.window)))
        known.step = self._steps
        known.recent.append(value + learned.difference)
        return learned.difference

    def _learn(self, learned: _LearnedDifference, steps: int, key: Hashable, value: float, least: float) -> None:
        known = self._known.get(key)
        is_new = known is not None and max(learned.compared_with, self._steps - AGO) < known.step
        if known is None or not is_new or steps <= self._options.warm_up:
            return
        learned.compared_with = known.step
        learned.comparisons.append(known.recent[-1] - value)
        count = len(learned.comparisons)
        if count < COMPARISONS:
            return
        scatter = _scatter(learned.comparisons)
        unsure = MEDIAN * DEVIATIONS * scatter / math.sqrt(count)
        usual = 2 * _scatter(known.recent)
        if unsure <= least / SAFETY and self._options.noise * scatter <= max(least, self._options.noise * usual):
            learned.difference = median(learned.comparisons)


def _scatter(values: Sequence[float] | deque[float]) -> float:
    """Return the median absolute deviation of normal values, of which nine in ten scatter as far as these. One outlier in ten
    counts for nothing; two groups of values do.
    """
    middle = median(values)
    deviations = sorted(abs(value - middle) for value in values)
    return max(median_deviation(values), deviations[int(0.9 * (len(deviations) - 1))] / NINE_IN_TEN)
