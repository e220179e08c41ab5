"""Emulated devices: ops padded by sleeping to stated durations, so that few cores show the timeline of many devices.

Off unless asked for. The numbers of the training are real; only the durations are made up, and whoever uses this says so in
their output.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from adaptra.cost import CostModel
from adaptra.program import Kind
from adaptra.runtime.faults import Fault, compute_extra, compute_factor


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """How long F, I and W take on every stage's pretended device, in seconds; each a number or one number per stage."""

    forward: float | Sequence[float]
    input_grad: float | Sequence[float]
    weight_grad: float | Sequence[float]

    def apply(self, cost: CostModel) -> CostModel:
        """The cost model with this device's durations in place of the estimated ones.

        Raises:
            CaseError: A sequence whose length is not the number of stages, or a negative duration.
        """
        return replace(
            cost,
            forward=_per_stage(self.forward, cost.stages),
            input_grad=_per_stage(self.input_grad, cost.stages),
            weight_grad=_per_stage(self.weight_grad, cost.stages),
        )


def _per_stage(given: float | Sequence[float], stages: int) -> tuple[float, ...]:
    return (float(given),) * stages if isinstance(given, int | float) else tuple(map(float, given))


@dataclass(frozen=True, slots=True)
class Pacing:
    """What lengthens a rank's ops beyond their own computation: an emulated device, injected slow stages, or both.

    Attributes:
        emulated: A cost model to whose durations every op is padded, or None.
        faults: Faults to order; only those of stages matter here.
    """

    emulated: CostModel | None
    faults: Sequence[Fault]

    def pad(self, stage: int, kind: Kind, step: int, started: float) -> None:
        """Sleep until the op that started at ``started`` (monotonic seconds) has lasted as long as it should."""
        if self.emulated is None and not self.faults:
            return
        duration = time.monotonic() - started if self.emulated is None else self.emulated.duration(stage, kind)
        duration = duration * compute_factor(self.faults, stage, step) + compute_extra(self.faults, stage, step)
        remaining = started + duration - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)
