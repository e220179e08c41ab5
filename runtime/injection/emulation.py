"""Emulated devices: ops padded by sleeping to stated durations, so that few cores show the timeline of many devices.

Off by default. Training computes real numbers, and only the durations are emulated. Programs that use it say so in their
output.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from adaptra.checks import is_finite
from adaptra.errors import OptionError
from adaptra.program import Kind
from adaptra.runtime.injection.faults import Fault, compute_extra, compute_factor
from adaptra.simulation.cost import CostModel


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """Durations of F, I and W on every stage's emulated device, in seconds; each a number or one number per stage.

    All replicas have the same durations. A worker that is slower than its peers is a fault, such as ``slow 1.2 2x``.
    """

    forward: float | Sequence[float]
    input_grad: float | Sequence[float]
    weight_grad: float | Sequence[float]

    def apply(self, cost: CostModel) -> CostModel:
        """Return the cost model with this device's durations instead of the estimated ones.

        Raises:
            OptionError: A sequence whose length is not the number of stages, or a duration that is no number or negative.
        """
        return replace(
            cost,
            forward=_per_stage("forward", self.forward, cost.stages),
            input_grad=_per_stage("input_grad", self.input_grad, cost.stages),
            weight_grad=_per_stage("weight_grad", self.weight_grad, cost.stages),
        )


def _per_stage(name: str, seconds: float | Sequence[float], stages: int) -> tuple[float, ...]:
    values: list[Any] = list(seconds) if isinstance(seconds, Sequence) and not isinstance(seconds, str) else [seconds] * stages
    if len(values) != stages:
        raise OptionError(
            f"EmulatedDevice: {name} has {len(values)} durations: expected one number for all stages or {stages}, one per stage"
        )
    for value in values:
        if not is_finite(value) or value < 0:
            raise OptionError(f"EmulatedDevice: {name}={seconds!r}: expected seconds, finite and not negative")
    return tuple(map(float, values))


@dataclass(frozen=True, slots=True)
class Pacing:
    """Lengthens one worker's ops beyond their own computation, for an emulated device, injected faults, or both.

    Attributes:
        emulated: A cost model to whose durations every op is padded, or None.
        faults: The worker's own faults, see :func:`.faults.faults_of_worker`; only those that slow ops change something here.
    """

    emulated: CostModel | None
    faults: Sequence[Fault]

    def pad(self, stage: int, kind: Kind, step: int, started: float) -> None:
        """Sleep until the op that started at ``started`` (monotonic seconds) has reached its duration."""
        if self.emulated is None and not self.faults:
            return
        duration = time.monotonic() - started if self.emulated is None else self.emulated.duration(stage, kind)
        duration = duration * compute_factor(self.faults, stage, step) + compute_extra(self.faults, stage, step)
        _sleep_until(started + duration)

    def pad_part(self, stage: int, kind: Kind, step: int, started: float, share: float) -> None:
        """Sleep until an emulated W or B that started at ``started`` has computed a share of its weights' gradients."""
        if self.emulated is None:
            return
        factor = compute_factor(self.faults, stage, step)
        weights = self.emulated.duration(stage, Kind.W)
        before = self.emulated.duration(stage, kind) - weights
        _sleep_until(started + factor * (before + share * weights))


def _sleep_until(instant: float) -> None:
    """Sleep until a time of the monotonic clock, if it is still to come."""
    remaining = instant - time.monotonic()
    if remaining > 0:
        time.sleep(remaining)
