"""News: the measurements of steps that the coordinator can't foresee, because they differ from the last one that was told.

A rank tells a measurement in full if a value has moved by half of what the detector takes for a change. It tells the next steps
as well, so the detector decides by exact values. Until it tells another one, the coordinator takes the last one for what the
rank measures.

A value that scatters is told in every step. The detector's limit is then the scatter and not the least change, so it has to see
all values. The same holds for the first steps of a rank, whose scatter is not known yet. What the detector counts or compares
exactly is told exactly: stalls, numbers of messages, and pauses long enough to explain a stall.

Each report carries the sum of the steps whose measurements were told last. The sum grows with each telling. So the coordinator
knows when it has missed one, and then takes nothing for measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from adaptra.errors import ControlError
from adaptra.runtime.detection.level_shift import DetectorOptions, median_deviation
from adaptra.runtime.measuring.measurement import StepMeasurement

PAUSE: Final = 0.01
"""Seconds: a shorter pause explains no stall, see :data:`adaptra.runtime.measuring.stalls.LEAST_STALL`."""

REMEMBERED: Final = 16
"""The number of steps over which a value's scatter is taken. Fewer are told in full."""

_Value = tuple[Hashable, float, float]
"""What a value is of, the value, and the least difference from it that is news."""


class NewsTeller:
    """Chooses which of a rank's measurements are news.

    Args:
        options: The thresholds of the detector.
    """

    def __init__(self, options: DetectorOptions | None = None) -> None:
        self._options = options or DetectorOptions()
        self._told: StepMeasurement | None = None
        self._left = 0
        self._values: dict[Hashable, float] = {}
        self._recent: dict[Hashable, deque[float]] = {}

    @property
    def told(self) -> int:
        """The step whose measurement was told last; 0 if none was."""
        return 0 if self._told is None else self._told.step

    def tell(self, measurements: Sequence[StepMeasurement]) -> tuple[StepMeasurement, ...]:
        """Take the measurements of the next steps, and return those that are news."""
        return tuple(measurement for measurement in measurements if self._is_news(measurement))

    def forget(self) -> None:
        """Tell the next measurement in full, because the coordinator is another one or has missed news."""
        self._told = None

    def _is_news(self, measured: StepMeasurement) -> bool:
        values = list(_values(measured, self._options))
        is_steady = True
        for where, value, band in values:
            recent = self._recent.setdefault(where, deque(maxlen=REMEMBERED))
            recent.append(value)
            # The detector's limit is 2 * band, or ``noise`` times the scatter if that is more.
            is_steady = is_steady and len(recent) == REMEMBERED and self._options.noise * median_deviation(recent) <= 2 * band
        told = self._told
        if (
            told is not None
            and _exact(told) == _exact(measured)
            and all(abs(value - self._values.get(where, value)) <= band for where, value, band in values)
        ):
            if is_steady and self._left == 0:
                return False
            self._left = max(self._left - 1, 0)
        elif told is not None:
            self._left = self._options.window
        self._told = measured
        self._values = {where: value for where, value, _ in values}
        return True


class NewsReader:
    """Gives the coordinator the measurements of all ranks again, from what they told."""

    def __init__(self) -> None:
        self._told: dict[int, StepMeasurement] = {}

    def read(
        self,
        ranks: Sequence[int],
        step: int,
        told: int,
        seconds: Sequence[float],
        news: Sequence[StepMeasurement],
    ) -> tuple[StepMeasurement, ...] | None:
        """Return the measurements of the last ``len(seconds)`` steps by these ranks, one step after the other.

        A rank without news in a step has measured nearly what it told last. Its step is said to have taken as long as the
        longest of these ranks. When its REDUCE was is not known.

        Args:
            ranks: The ranks that report.
            step: The last step.
            told: The sum over these ranks of the step whose measurement each told last.
            seconds: By step, the most seconds that it took one of these ranks.
            news: The measurements that are told now.

        Returns:
            None if earlier news were missed, so that it is not known what some rank measured.

        Raises:
            ControlError: The news are of another rank or of another step.
        """
        first = step + 1 - len(seconds)
        reporting = set(ranks)
        reported: dict[tuple[int, int], StepMeasurement] = {}
        for measured in news:
            if measured.rank not in reporting or not first <= measured.step <= step:
                raise ControlError(
                    f"news of rank {measured.rank} in step {measured.step}: expected a rank below the sender and a step from "
                    f"{first} to {step}"
                )
            reported[measured.step, measured.rank] = measured
        before = {rank: self._told.get(rank) for rank in ranks}
        self._told |= {measured.rank: measured for _, measured in sorted(reported.items())}
        last = [self._told.get(rank) for rank in ranks]
        if sum(one.step for one in last if one is not None) != told or None in last:
            return None
        result: list[StepMeasurement] = []
        for number, longest in enumerate(seconds, start=first):
            for rank in ranks:
                measured = reported.get((number, rank))
                if measured is None:
                    if (known := before[rank]) is None:
                        continue  # the first telling of a new coordinator need not be of the first step
                    measured = replace(known, step=number, seconds=longest, reduce=None)
                else:
                    before[rank] = measured
                result.append(measured)
        return tuple(result)


def _values(measured: StepMeasurement, options: DetectorOptions) -> Iterator[_Value]:
    """Yield the values of which the detector follows the level, each with half of the least change that it detects.

    A change of an edge is compared with the mean forward of all stages. It is taken to be at least half of this rank's.
    """
    forward = 0.0
    for stage in measured.stages:
        forward = max(forward, stage.forward or 0.0)
        if stage.forward is not None and stage.backward is not None:
            total = stage.forward + stage.backward
            yield ("stage", stage.stage), total, options.change * total / 2
    for edge in measured.edges:
        estimate, where = edge.estimate, (edge.source, edge.destination)
        band = max(options.edge_change * abs(estimate.flight), options.change * forward / 2) / 2
        yield ("flight", where), estimate.flight, band
        if estimate.occupancy is not None:
            yield ("occupancy", where), estimate.occupancy, band
        if estimate.spacing is not None:
            # The detector takes it for a bound of what is at most the flight.
            yield ("spacing", where), min(estimate.spacing, estimate.flight), band


def _exact(measured: StepMeasurement) -> Hashable:
    """Return what must be equal for a measurement to be no news."""
    stages = tuple((one.stage, one.forward is None, one.input_grad is None, one.both is None) for one in measured.stages)
    edges = tuple(
        (one.source, one.destination, one.messages, one.stalls, one.estimate.occupancy is None, one.estimate.spacing is None)
        for one in measured.edges
    )
    return stages, edges, measured.pause if measured.pause > PAUSE else 0.0, measured.has_met
