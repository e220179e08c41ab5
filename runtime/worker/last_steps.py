"""What one rank knows of its last steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from adaptra.collectives.choice import SumWay
from adaptra.runtime.detection.shape_scales import ShapeScales
from adaptra.runtime.measuring.measurement import StageMeasurement, StepMeasurement
from adaptra.runtime.measuring.reduces import StageReduce
from adaptra.runtime.measuring.step_norms import NoiseOfStages
from adaptra.runtime.worker.ends.step_end import Certificate
from adaptra.runtime.worker.step.shapes import RankShape

KEPT_MEASUREMENTS: Final = 5
"""The number of steps whose stage measurements a rank keeps."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """A step that has run, and has filled no ``grad`` yet.

    Attributes:
        certificate: What its gradients are made of.
        measurement: What this rank measured.
        shape: The shape of its batch.
        at_home: Whether each replica computed its own microbatches, though the plan has routes.
    """

    certificate: Certificate
    measurement: StepMeasurement
    shape: RankShape
    at_home: bool


class LastSteps:
    """Keeps what was measured of the last steps.

    Args:
        stages: The number of the rank's stages.

    Attributes:
        run: The step that has run last, until ``grad`` is filled.
        measured: Measurements of this rank's stages in the last steps, oldest first.
        reduces: REDUCE of the last step but one, on this rank's stages. On the coordinator's rank that of all stages, in the
            last step of which all ranks have told it.
        way: How the next step's gradients are added; None where a job does not choose, and before its first step.
        noise: The gradient noise scale of this rank's stages; None where it is not measured.
        samples: The rows of the last step's batch.
        tokens: Its tokens and the input that they are counted in, as :attr:`.step.shapes.StepShape.tokens`.
    """

    def __init__(self, stages: int) -> None:
        self.run: RunStep | None = None
        self.measured: deque[StageMeasurement] = deque(maxlen=KEPT_MEASUREMENTS * stages)
        self.reduces: tuple[StageReduce, ...] = ()
        self.way: SumWay | None = None
        self.noise: NoiseOfStages | None = None
        self.samples = 0
        self.tokens: tuple[int, str] | None = None
        self._scales = ShapeScales()

    def take(self, measurement: StepMeasurement, of: RankShape, *, at_home: bool) -> StepMeasurement:
        """Take what was measured of a step, and return what of it is comparable with other steps.

        Ops and messages of another shape take other times, which are no change of a stage or link.

        Args:
            measurement: What was measured.
            of: The shape of the step's batch.
            at_home: Whether the step ran at home, because another replica's batch had another shape.
        """
        self.samples, self.tokens = sum(of.shape.rows), of.shape.tokens
        comparable = replace(measurement, stages=(), edges=())
        if of.sizes is not None and not at_home:
            comparable = self._scales.convert(of.shape.code, of.sizes, measurement)
        self.measured.extend(comparable.stages)
        return comparable
