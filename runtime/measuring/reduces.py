"""REDUCE: how much of the sum of gradients over replicas costs a step, and how much of it is hidden.

Steps have no barrier. A rank sums its gradients once its own ops have ended, and begins its next step after that. So REDUCE
costs the time by which it delays the rank's first op of the next step. The rank of the first stage waits for no message there,
and pays for all of its REDUCE. Another rank's first op needs a message of the stage before. What has ended when that arrives is
hidden.

A rank knows this by itself, on its own clock, but only once the next step has run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from adaptra.collectives.late_ranks import SumChoice
from adaptra.runtime.measuring.measurement import ReduceTimes, StepMeasurement

MOST_PENDING: Final = 16
"""The number of steps whose measurements are kept until all ranks have sent theirs. In large jobs some ranks send none."""


@dataclass(frozen=True, slots=True)
class StageReduce:
    """REDUCE of one step on one rank: the sum over the replicas of its stages' gradients.

    Attributes:
        stages: The rank's stages. Gradients of several stages are added together.
        seconds: Its duration, including the wait for replicas that come later.
        hidden: The seconds of it that cost the rank nothing; None where not known.
        exposed: The other seconds, by which it delayed the rank's first op of the next step; None where not known.
        nbytes: The bytes of the gradients that were added.
        choice: How it was made, who came late to it and what other ways would take; None where a job does not choose.
    """

    stages: tuple[int, ...]
    seconds: float
    hidden: float | None
    exposed: float | None
    nbytes: int
    choice: SumChoice | None = None

    @property
    def name(self) -> str:
        """The stages as text, such as ``0`` or ``0,3``."""
        return ",".join(map(str, self.stages))

    def __str__(self) -> str:
        text = f"stage {self.name}: {1e3 * self.seconds:.1f} ms"
        if self.hidden is not None and self.exposed is not None:
            text += f", hidden {1e3 * self.hidden:.1f} ms, exposed {1e3 * self.exposed:.1f} ms"
        return f"{text}, {self.nbytes} bytes" + ("" if self.choice is None else f"; {self.choice}")


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


def exposed_seconds(start: float, end: float, computed: float, ready: float, arrived: float) -> float:
    """Return the time by which REDUCE of one step delays a rank's first op of the next; all on one clock, in seconds.

    That op begins at ``max(ready, arrived)``. Without the part of REDUCE after the last op, the rank would have been ready
    earlier by that part.

    Args:
        start: The beginning of REDUCE.
        end: The end of REDUCE.
        computed: The end of the rank's last op of the step.
        ready: When the rank was ready for the first op of the next step. Between are the user's optimizer and data.
        arrived: When the message of that op arrived; minus infinity if it needs none.
    """
    after = max(end - max(start, computed), 0.0)
    return min(after, max(ready - arrived, 0.0))


class FirstOp:
    """The begin of a step on one rank: when the rank was ready for its first op, and when that op's message arrived.

    Attributes:
        ready: The mark of the rank's clock at which it was ready, or None before that.
    """

    def __init__(self) -> None:
        self.ready: Any = None
        self._needed: list[tuple[tuple[int, int] | None, float, float, float]] = []

    def needs(self, edge: tuple[int, int] | None, sent_at: float, departed_at: float, arrived_at: float) -> None:
        """Add a message that it needs; ``edge`` is its directed edge of stages, None if it came from another replica."""
        self._needed.append((edge, sent_at, departed_at, arrived_at))

    def arrival(self, usual: Mapping[tuple[int, int], float]) -> float:
        """Return when its last message arrived, or would have arrived if requested before; minus infinity if it needs none.

        Over some transports a message waits until it is requested, which is after the step's begin.

        Args:
            usual: The seconds of a message that does not queue, per directed edge.
        """
        latest = -math.inf
        for edge, sent, departed, arrived in self._needed:
            flight = arrived - departed if edge is None else usual[edge]
            latest = max(latest, min(arrived, sent + flight))
        return latest


def own_reduce(measurement: StepMeasurement) -> tuple[StageReduce, ...]:
    """Return what a rank tells of its own REDUCE: nothing without other replicas, and in the first step."""
    if (reduce := measurement.reduce) is None:
        return ()
    return (_stage_reduce(measurement, reduce),)


def _stage_reduce(measurement: StepMeasurement, reduce: ReduceTimes) -> StageReduce:
    stages = tuple(one.stage for one in measurement.stages)
    hidden = None if reduce.exposed is None else reduce.seconds - reduce.exposed
    return StageReduce(stages, reduce.seconds, hidden, reduce.exposed, reduce.nbytes, reduce.choice)


def usual_reduces(steps: Sequence[StepReduces]) -> tuple[StageReduce, ...]:
    """Return one entry for each rank: the medians over those steps whose exposed part is known, or over all if it never is."""
    by_stages: dict[tuple[int, ...], list[StageReduce]] = {}
    for step in steps:
        for one in step.stages:
            by_stages.setdefault(one.stages, []).append(one)
    usual: list[StageReduce] = []
    for stages, entries in sorted(by_stages.items()):
        entries = [one for one in entries if one.exposed is not None] or entries
        hidden = [one.hidden for one in entries if one.hidden is not None]
        exposed = [one.exposed for one in entries if one.exposed is not None]
        usual.append(
            StageReduce(
                stages,
                median(one.seconds for one in entries),
                median(hidden) if hidden else None,
                median(exposed) if exposed else None,
                entries[-1].nbytes,
                entries[-1].choice,
            )
        )
    return tuple(usual)


class ReduceTracker:
    """Gathers REDUCE of a step from the ranks of a pipeline. Those of other replicas are left out.

    Args:
        rank: The rank of the pipeline that gathers them.
        ranks: The ranks of the pipeline, as measurements name them.
    """

    def __init__(self, rank: int, ranks: range) -> None:
        self._rank = rank
        self._ranks = ranks
        self._steps: dict[int, dict[int, StageReduce]] = {}

    def observe(self, measurement: StepMeasurement) -> StepReduces | None:
        """Take the measurement of one rank in one step.

        Returns:
            REDUCE of the step before once all ranks have told theirs; else None, also without other replicas.
        """
        reduce = measurement.reduce
        if reduce is None or measurement.rank not in self._ranks:
            return None
        of_step = self._steps.setdefault(reduce.step, {})
        of_step[measurement.rank] = _stage_reduce(measurement, reduce)
        if len(of_step) < len(self._ranks):
            for step in sorted(self._steps)[:-MOST_PENDING]:
                del self._steps[step]
            return None
        for step in [step for step in self._steps if step <= reduce.step]:
            del self._steps[step]
        return StepReduces(self._rank, reduce.step, tuple(sorted(of_step.values(), key=lambda each: each.stages)))
