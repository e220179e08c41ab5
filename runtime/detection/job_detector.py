"""The detector of a job: one detector for each replica, and what they find at the same step as one detection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from adaptra.runtime.detection.detector import Detection, Detector
from adaptra.runtime.detection.level_shift import DetectorOptions
from adaptra.runtime.measuring.measurement import StepMeasurement
from adaptra.simulation.cost import CostModel

MEASURED: Final = (
    *("forward", "input_grad", "weight_grad"),
    *("latency_forward", "latency_backward", "occupancy_forward", "occupancy_backward"),
    "update",
)
"""The costs that steps measure; the others, such as memory, are the same in all replicas."""


class JobDetector:
    """Detects changes in the measurements of all workers of a job.

    Args:
        cost: The estimated cost model of each replica.
        replicas: The number of replicas. Worker w is of replica w // (workers of a replica).
        workers: The number of workers of a replica.
        options: The thresholds of a change.
    """

    def __init__(self, cost: CostModel, replicas: int, workers: int, options: DetectorOptions | None = None) -> None:
        self._workers = workers
        self._detectors = [Detector(cost, options) for _ in range(replicas)]

    @property
    def cost(self) -> CostModel:
        """The current cost model, in seconds; of several replicas the largest of each cost."""
        return largest([detector.cost for detector in self._detectors])

    @property
    def is_calibrated(self) -> bool:
        """Whether the costs of all replicas are measured ones."""
        return all(detector.is_calibrated for detector in self._detectors)

    @property
    def latest(self) -> Detection:
        """The costs of the recent steps; see :attr:`.detector.Detector.latest`."""
        found = [detector.latest for detector in self._detectors]
        return self._joined(found[0].step, found)

    def noise_of(self, steps: int) -> float:
        """Return the standard deviation of a step's time over the latest steps, seconds; the largest of a replica."""
        return max(detector.noise_of(steps) for detector in self._detectors)

    def observe(self, measurements: Sequence[StepMeasurement]) -> Detection | None:
        """Take the measurements of all workers of one step.

        Returns:
            A detection if the costs of a replica have changed, else None.

        Raises:
            ControlError: A measurement names a stage or edge that the pipelines do not have.
        """
        return self._each(measurements, Detector.observe)

    def foresee(self, measurements: Sequence[StepMeasurement]) -> Detection | None:
        """Return the detection that would follow if the next step measured the same; see :meth:`.detector.Detector.foresee`."""
        return self._each(measurements, Detector.foresee)

    def _each(
        self,
        measurements: Sequence[StepMeasurement],
        ask: Callable[[Detector, Sequence[StepMeasurement]], Detection | None],
    ) -> Detection | None:
        of_replica: list[list[StepMeasurement]] = [[] for _ in self._detectors]
        for one in self._without_waits(measurements):
            of_replica[one.rank // self._workers].append(one)
        detections = [ask(detector, mine) for detector, mine in zip(self._detectors, of_replica, strict=True)]
        if all(one is None for one in detections):
            return None
        return self._joined(measurements[0].step, detections)

    def _without_waits(self, measurements: Sequence[StepMeasurement]) -> list[StepMeasurement]:
        """Return the measurements with updates in which no replica waits for another one: with the shortest REDUCE of all."""
        shortest: dict[int, float] = {}
        for measurement in measurements:
            if measurement.reduce is not None:
                place = measurement.rank % self._workers
                shortest[place] = min(shortest.get(place, measurement.reduce.seconds), measurement.reduce.seconds)
        return [
            one
            if one.update is None or one.reduce is None
            else replace(one, update=max(one.update - one.reduce.seconds, 0.0) + shortest[one.rank % self._workers])
            for one in measurements
        ]

    def _joined(self, step: int, detections: Sequence[Detection | None]) -> Detection:
        """Return what the detectors of all replicas have found as one detection. Those that found nothing keep their costs.

        Lossy edges have scenarios in a job of one replica only.
        """
        by_replica = tuple(
            detector.cost if one is None else one.cost for detector, one in zip(self._detectors, detections, strict=True)
        )
        known = [one for one in detections if one is not None]
        if len(detections) == 1:
            return replace(known[0], step=step, by_replica=by_replica)
        changes = tuple(
            replace(change, replica=replica)
            for replica, one in enumerate(detections)
            if one is not None
            for change in one.changes
        )
        hold_off = min((one.hold_off for one in known if one.changes), default=0)
        noise = max(one.noise for one in known)
        return Detection(step, changes, largest(by_replica), (), hold_off, noise, by_replica)


def largest(costs: Sequence[CostModel]) -> CostModel:
    """Return the first cost model with the largest of each measured cost."""
    found = {name: tuple(map(max, zip(*(getattr(cost, name) for cost in costs), strict=True))) for name in MEASURED}
    return replace(costs[0], **found)
