"""REDUCE per stage: how much of it other stages' compute hides, found from what all ranks of a pipeline measured.

A rank adds its gradients over the replicas as soon as its own ops have ended. While other stages still compute, the sum costs
the step nothing: it is hidden. What remains after the pipeline's last op has ended is exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from adaptra.runtime.detection.measurement import ReduceTimes, StepMeasurement

MOST_PENDING: Final = 16
"""The number of steps whose measurements are kept until all ranks have sent theirs. In large jobs some ranks send none."""


@dataclass(frozen=True, slots=True)
class StageReduce:
    """REDUCE of one step on one rank: the sum over the replicas of its stages' gradients.

    Attributes:
        stages: The rank's stages. Gradients of several stages are added together.
        seconds: Its duration, including the wait for replicas that come later.
        hidden: The seconds of it in which another stage of the pipeline had not ended its compute; None where not known.
        exposed: The other seconds, in which the step waits for nothing else; None where not known.
        nbytes: The bytes of the gradients that were added.
    """

    stages: tuple[int, ...]
    seconds: float
    hidden: float | None
    exposed: float | None
    nbytes: int

    @property
    def name(self) -> str:
        """The stages as text, such as ``0`` or ``0,3``."""
        return ",".join(map(str, self.stages))

    def __str__(self) -> str:
        text = f"stage {self.name}: {1e3 * self.seconds:.1f} ms"
        if self.hidden is not None and self.exposed is not None:
            text += f", hidden {1e3 * self.hidden:.1f} ms, exposed {1e3 * self.exposed:.1f} ms"
        return f"{text}, {self.nbytes} bytes"


@dataclass(frozen=True, slots=True)
class StepReduces:
    """REDUCE of one step on all ranks of a pipeline.

    Attributes:
        rank: The rank that gathered them, which is the coordinator.
        step: The step's number.
        stages: One entry for each rank, by first stage.
    """

    rank: int
    step: int
    stages: tuple[StageReduce, ...]

    def __str__(self) -> str:
        return f"step {self.step}: REDUCE of " + "; ".join(map(str, self.stages))


def hidden_seconds(start: float, end: float, computed: float) -> float:
    """Return the part of REDUCE before ``computed``, at which the pipeline's last op ended; all on one clock, in seconds."""
    return min(max(computed - start, 0.0), end - start)


def own_reduce(measurement: StepMeasurement) -> tuple[StageReduce, ...]:
    """Return what a rank alone knows of its REDUCE: nothing without other replicas, and else not how much is hidden."""
    if (reduce := measurement.reduce) is None:
        return ()
    stages = tuple(one.stage for one in measurement.stages)
    return (StageReduce(stages, reduce.end - reduce.start, None, None, reduce.nbytes),)


def usual_reduces(steps: Sequence[StepReduces]) -> tuple[StageReduce, ...]:
    """Return one entry for each rank: the medians over some steps; of those whose hidden part is known, if there are any."""
    by_stages: dict[tuple[int, ...], list[StageReduce]] = {}
    for step in steps:
        for one in step.stages:
            by_stages.setdefault(one.stages, []).append(one)
    found: list[StageReduce] = []
    for stages, entries in sorted(by_stages.items()):
        hidden = [one.hidden for one in entries if one.hidden is not None]
        exposed = [one.exposed for one in entries if one.exposed is not None]
        found.append(
            StageReduce(
                stages,
                median(one.seconds for one in entries),
                median(hidden) if hidden else None,
                median(exposed) if exposed else None,
                entries[-1].nbytes,
            )
        )
    return tuple(found)


class ReduceTracker:
    """Gathers the measurements of a step from the ranks of a pipeline. Those of other replicas are left out.

    Args:
        rank: The rank of the pipeline that gathers them.
        ranks: The ranks of the pipeline, as measurements name them.
    """

    def __init__(self, rank: int, ranks: range) -> None:
        self._rank = rank
        self._ranks = ranks
        self._steps: dict[int, dict[int, StepMeasurement]] = {}

    def observe(self, measurement: StepMeasurement, gained: Callable[[int], float]) -> StepReduces | None:
        """Take a measurement.

        Args:
            measurement: That of one rank in one step.
            gained: Returns the clock drift since the start, as :meth:`.clock_drift.ClockDrift.gained`.

        Returns:
            REDUCE of the step once all ranks have measured it; else None, also without other replicas.
        """
        if measurement.reduce is None or measurement.rank not in self._ranks:
            return None
        of_step = self._steps.setdefault(measurement.step, {})
        of_step[measurement.rank] = measurement
        if len(of_step) < len(self._ranks):
            for step in sorted(self._steps)[:-MOST_PENDING]:
                del self._steps[step]
            return None
        for step in [step for step in self._steps if step <= measurement.step]:
            del self._steps[step]
        return StepReduces(self._rank, measurement.step, _stage_reduces(of_step.values(), gained))


def _stage_reduces(measured: Collection[StepMeasurement], gained: Callable[[int], float]) -> tuple[StageReduce, ...]:
    found: list[tuple[tuple[int, ...], float, ReduceTimes]] = []
    for one in measured:
        stages = tuple(each.stage for each in one.stages)
        drift = sum(map(gained, range(min(stages))))
        if one.reduce is not None:
            found.append((stages, drift, one.reduce))
    computed = max(reduce.computed - drift for _, drift, reduce in found)
    reduces: list[StageReduce] = []
    for stages, drift, reduce in sorted(found, key=lambda each: each[0]):
        seconds = reduce.end - reduce.start
        hidden = hidden_seconds(reduce.start, reduce.end, computed + drift)
        reduces.append(StageReduce(stages, seconds, hidden, seconds - hidden, reduce.nbytes))
    return tuple(reduces)
