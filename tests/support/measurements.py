"""What four ranks with a stage each measure of steps, and a detector that has seen some."""

from __future__ import annotations

from collections.abc import Callable

from adaptra.runtime.detection.detector import Detection, Detector
from adaptra.runtime.measuring.measurement import EdgeEstimate, EdgeMeasurement, StageMeasurement, StepMeasurement
from adaptra.simulation.cost import CostModel

STAGES = 4
ESTIMATED = CostModel.uniform(STAGES, 0.005, 0.005, 0.005, latency=0.001)
HEALTHY = CostModel(
    (0.02, 0.021, 0.019, 0.02),
    (0.02,) * 4,
    (0.01,) * 4,
    (2e-4,) * 3,
    (3e-4,) * 3,
    (0.0,) * 3,
    (0.0,) * 3,
    memory_forward=(7.0,) * 4,
)
SLOW = HEALTHY.with_latency(1, 2, 0.06)


def measured(
    step: int, cost: CostModel, *, noise: Callable[[], float] = lambda: 1.0, both: bool = False
) -> list[StepMeasurement]:
    """What four ranks would measure in a step with these costs."""
    found: list[StepMeasurement] = []
    for stage in range(STAGES):
        forward, input_grad, weight_grad = (
            values[stage] * noise() for values in (cost.forward, cost.input_grad, cost.weight_grad)
        )
        durations = (forward, None, None, input_grad + weight_grad) if both else (forward, input_grad, weight_grad, None)
        edges: list[EdgeMeasurement] = []
        for source in (stage - 1, stage + 1):
            if 0 <= source < STAGES:
                latency, occupancy = cost.latency(source, stage), cost.occupancy(source, stage)
                seen = EdgeEstimate((latency + occupancy) * noise(), occupancy or None, max(occupancy, 0.005))
                edges.append(EdgeMeasurement(source, stage, 16, 0.0, seen))
        found.append(StepMeasurement(stage, step, 1.0, (StageMeasurement(stage, *durations),), tuple(edges)))
    return found


def run(detector: Detector, costs: list[CostModel], first: int = 0) -> list[Detection]:
    """What a detector finds in steps with these costs."""
    found = (detector.observe(measured(first + index, cost)) for index, cost in enumerate(costs))
    return [detection for detection in found if detection is not None]


def calibrated() -> Detector:
    """One that has seen four healthy steps."""
    detector = Detector(HEALTHY)
    (detection,) = run(detector, [HEALTHY] * 4)
    assert detection.changes == ()
    return detector
