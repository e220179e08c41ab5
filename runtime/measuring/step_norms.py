"""The squared norms of one step's gradients of one rank's stages, as the ranks of its column have told them to each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from math import isinf
from typing import Any

from adaptra.errors import ControlError
from adaptra.json_files import Fields
from adaptra.planning.synchrony.noise_scale import NoiseScale, NoiseScaleEstimator, TermNorms

UNITS = {"rows": "rows", "weights": "units of weight"}
"""What the samples of gradients are counted in, and how that is said: rows of the batch, or what ``weighted`` losses return."""


@dataclass(frozen=True, slots=True)
class StepNorms:
    """What one step says of the noise of some stages' gradients. It is the same on all replicas.

    Attributes:
        stages: The stages.
        norms: The squared norms of each replica's mean gradient, and of the mean of all.
        samples: The samples in each replica's gradient.
        unit: What samples are counted in: see :data:`UNITS`.
        loss: The loss of the whole batch; None where it is not finite.
    """

    stages: tuple[int, ...]
    norms: TermNorms
    samples: tuple[float, ...]
    unit: str
    loss: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields that :meth:`of_fields` reads back."""
        return {
            "stages": [*self.stages],
            "terms": [*self.norms.terms],
            "mean": self.norms.mean,
            "samples": [*self.samples],
            "unit": self.unit,
            "loss": self.loss,
        }

    @staticmethod
    def of_fields(fields: Fields) -> StepNorms:
        """Read the norms of a step.

        Raises:
            ControlError: A field is missing or invalid.
        """
        replicas = len(fields.items("terms"))
        terms, samples = fields.numbers("terms", replicas), fields.numbers("samples", replicas)
        if replicas < 2:
            raise fields.refuse("terms", "the numbers of at least two replicas", [*terms])
        unit, stages = fields.text("unit", at_most=16), fields.wholes("stages")
        if unit not in UNITS:
            raise fields.refuse("unit", f"one of {', '.join(UNITS)}", unit)
        loss = None if fields.raw("loss") is None else fields.instant("loss")
        return StepNorms(stages, TermNorms(terms, fields.number("mean")), samples, unit, loss)


def whole_norms(parts: Iterable[StepNorms]) -> StepNorms:
    """Return the norms of all stages in a step from those of disjoint ones.

    Raises:
        ControlError: They are not of the same samples.
    """
    return reduce(_joined, parts)


def _joined(joined: StepNorms, other: StepNorms) -> StepNorms:
    if (joined.samples, joined.unit) != (other.samples, other.unit):
        raise ControlError(
            f"norms of stages {joined.stages} are of {joined.samples} {joined.unit}, and those of stages {other.stages} of "
            f"{other.samples} {other.unit}: expected those of one step"
        )
    return replace(joined, stages=tuple(sorted((*joined.stages, *other.stages))), norms=joined.norms.plus(other.norms))


class NoiseOfStages:
    """The gradient noise scale of some stages, from their norms step by step.

    Attributes:
        skipped: The steps that had no norms.
        last: The norms of the last step that had some; None before it.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.last: StepNorms | None = None
        self._estimator: NoiseScaleEstimator | None = None

    def take(self, norms: StepNorms | None) -> None:
        """Take the norms of a step, or that it had none. If samples are counted otherwise than before, begin anew."""
        if norms is None:
            self.skipped += 1
            return
        before, self.last = self.last, norms
        if self._estimator is None or before is None or (before.unit, len(before.samples)) != (norms.unit, len(norms.samples)):
            self._estimator = NoiseScaleEstimator(norms.samples, len(norms.samples))
        self._estimator.add(norms.norms, norms.samples)

    @property
    def estimate(self) -> NoiseScale | None:
        """The noise scale; None before the first step that had norms."""
        return None if self._estimator is None else self._estimator.estimate

    def __str__(self) -> str:
        """The noise scale with its interval, and what it was measured from."""
        skipped = f"; {self.skipped} steps had no norms" if self.skipped else ""
        if (estimate := self.estimate) is None or self.last is None:
            return f"not known yet{skipped}"
        interval = f"{estimate.low:.4g} to {'any' if isinf(estimate.high) else f'{estimate.high:.4g}'}"
        return f"{estimate.value:.4g} {UNITS[self.last.unit]} ({interval}), from {estimate.steps} steps{skipped}"
