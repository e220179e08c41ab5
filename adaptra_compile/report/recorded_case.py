"""The case of synchronisation that a run has shown: how fast its replicas are, how much that differs, and their noise scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final

from adaptra.errors import ReportError
from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.clock import draw_times, pace_of
from adaptra.planning.synchrony.modes import parse_mode
from adaptra.planning.synchrony.noise_scale import NoiseScale
from adaptra.report.run_records import Run
from adaptra.runtime.measuring.step_norms import UNITS, NoiseOfStages, StepNorms, whole_norms
from adaptra.runtime.telemetry.records import NormsTold

_SLOW: Final = 1.05
"""A replica is not slow below this many times the fastest one's time."""
_TO_DEVIATION: Final = 1.4826
"""Of the median distance from the median of normal numbers."""


@dataclass(frozen=True, slots=True)
class RecordedCase:
    """What a run has shown.

    Attributes:
        fields: The fields of a :class:`~adaptra.planning.synchrony.case.SynchronyCase`.
        noise: The noise scale of the whole model; None where norms were not measured.
        unit: What samples are counted in.
        steps: The number of steps that were looked at.
        losses: The loss of each step that has one.
        done: The updates so far.
        step_seconds: The usual seconds of a step.
    """

    fields: Mapping[str, Any]
    noise: NoiseScale | None
    unit: str
    steps: int
    losses: Mapping[int, float]
    done: int
    step_seconds: float

    def lines(self) -> Iterator[str]:
        """Yield what the run has shown as text."""
        slow: dict[str, float] = self.fields["slow"]
        named = ", ".join(f"{replica} takes {factor:.3g} times as long" for replica, factor in slow.items())
        which = f"of replicas {named}" if slow else "no replica is slow"
        yield f"run       {self.steps} steps, usually {self.step_seconds:.4g} s; {which}; jitter {self.fields['jitter']:.3g}"
        if self.noise is not None:
            high = "any number" if math.isinf(self.noise.high) else f"{self.noise.high:.4g}"
            interval = f"{self.noise.low:.4g} to {high}"
            yield f"noise     {self.noise.value:.4g} {self.unit} ({interval}), from {self.noise.steps} steps"

    def to_json(self) -> dict[str, Any]:
        """Return what the run has shown as JSON values."""
        return {
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "updates": self.done,
            "unit": self.unit,
            "noise": None if self.noise is None else self.noise.to_json() | {"high": _or_none(self.noise.high)},
        }


def _or_none(value: float) -> float | None:
    return None if math.isinf(value) else value


def norms_of(run: Run) -> dict[int, StepNorms]:
    """Return the norms of all stages by step, of steps in which all ranks of a pipeline know theirs."""
    by_step: dict[int, dict[int, StepNorms]] = {}
    for own in run.records:
        for one in own:
            if isinstance(one.record, NormsTold):
                by_step.setdefault(one.record.step, {})[one.record.rank] = one.record.norms
    complete = {step: of_ranks for step, of_ranks in sorted(by_step.items()) if len(of_ranks) == run.started.ranks}
    return {step: whole_norms(of_ranks.values()) for step, of_ranks in complete.items()}


def recorded_case(run: Run, *, needs_noise: bool) -> RecordedCase:
    """Return what a run of several replicas has shown.

    Args:
        run: The run.
        needs_noise: Whether the noise scale is needed; false if somebody says it.

    Raises:
        ReportError: It has one replica, no steps or no norms, or the gradient can't be told from noise.
    """
    if not run.peers:
        raise ReportError(f"{run.folder}: a run of one replica: expected two or more, of which modes differ")
    if not run.steps or not (paces := _paces(run)):
        raise ReportError(f"{run.folder}: no step with its times: expected a run of some steps")
    norms = norms_of(run)
    if needs_noise and not norms:
        raise ReportError(
            f"{run.folder}: no norms of gradients: expected a run with Options(noise_scale=True), or --phi SAMPLES"
        )
    noise = NoiseOfStages()
    for one in norms.values():
        noise.take(one)
    estimate = noise.estimate
    fields: dict[str, Any] = {"replicas": len(run.replicas), "microbatches": run.started.microbatches, **_times(run, paces)}
    if estimate is not None:
        if needs_noise and not 0 < estimate.value < math.inf:
            raise ReportError(
                f"{run.folder}: the noise scale of {estimate.steps} steps is {estimate.value:g}: expected more steps, until "
                "gradient and noise can be told apart, or --phi SAMPLES"
            )
        fields["batch"] = fmean(fmean(one.samples) for one in norms.values())
        fields["phi"] = estimate.value
    losses = {step: one.loss for step, one in norms.items() if one.loss is not None}
    unit = "samples" if noise.last is None else UNITS[noise.last.unit]
    seconds = median(one.seconds for one in run.steps)
    return RecordedCase(fields, estimate, unit, len(run.steps), losses, run.steps[-1].step + 1, seconds)


def _paces(run: Run) -> list[list[float]]:
    """Return for each replica its seconds of a microbatch step by step: those of its slowest worker in that step."""
    by_replica: dict[int, dict[int, float]] = {}
    for works in run.works.values():
        for step, work in works[1:] or works:  # the first step warms up
            if work.per_microbatch is not None:
                of_step = by_replica.setdefault(work.replica, {})
                of_step[step] = max(of_step.get(step, 0.0), work.per_microbatch)
    if len(by_replica) < len(run.replicas):
        return []
    return [[*of_step.values()] for _, of_step in sorted(by_replica.items())]


def _times(run: Run, paces: list[list[float]]) -> dict[str, Any]:
    """Return the fields of a case that say how fast replicas are.

    The seconds of a replica's step are such that the steps of the run, as it shared microbatches, take what they have taken.
    """
    usual = [median(one) for one in paces]
    factors = [one / min(usual) for one in usual]
    slow = {str(replica): factor for replica, factor in enumerate(factors) if factor >= _SLOW}
    distances = [abs(math.log(one / middle)) for own, middle in zip(paces, usual, strict=True) for one in own]
    jitter = _TO_DEVIATION * median(distances)
    case = SynchronyCase(
        len(paces), 1.0, {int(one): factor for one, factor in slow.items()}, jitter, microbatches=run.started.microbatches
    )
    times = draw_times(case)
    is_shared = any(work.taken for works in run.works.values() for _, work in works)
    exact = pace_of(parse_mode("exact"), case, times).seconds if is_shared else fmean(max(row) for row in times)
    measured, exchange = median(one.seconds for one in run.steps), _exchange(run)
    exchange = exchange if exchange < measured else 0.0
    return {"slow": slow, "jitter": jitter, "seconds": (measured - exchange) / exact, "exchange": exchange}


def _exchange(run: Run) -> float:
    """Return the usual seconds for which an exchange of gradients delays an update.

    The replica that comes last to the sum of a stage does not wait for others. Of the stages the slowest counts.
    """
    exposed: dict[int, dict[tuple[int, ...], float]] = {}
    for works in run.works.values():
        for step, work in works:
            if work.exposed is not None:
                of_stages = exposed.setdefault(step, {})
                of_stages[work.stages] = min(of_stages.get(work.stages, math.inf), work.exposed)
    return median(max(one.values()) for one in exposed.values()) if exposed else 0.0
