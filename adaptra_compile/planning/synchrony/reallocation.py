"""What the resources of a job bring before its mode changes: microbatches that move, and messages that go round a link.

Neither changes a bit. So they are compared first, as STAR moves processors and bandwidth between jobs before it leaves the
synchronous mode. A synchronisation case tells what shares of microbatches bring. Detours need the links of a job's case.
Threads are left out: no case has the times of a step by their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from adaptra.errors import CaseError
from adaptra.planning.remedies.job_remedies import RemedyComparison, compare_remedies
from adaptra.planning.routes.joined_programs import join
from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.clock import StepTimes, pace_of
from adaptra.planning.synchrony.modes import Synchronous
from adaptra.program.placement import is_straight
from adaptra.program.schedules import one_f_one_b
from adaptra.simulation.case import Case


@dataclass(frozen=True, slots=True)
class Reallocation:
    """What moving work within a job brings.

    Attributes:
        equal: Seconds of an exact update if each replica computes its own microbatches.
        shared: The same if lasting speed decides how many each computes.
        job: What else can be done on the links and workers of a job; None without its case.
    """

    equal: float
    shared: float
    job: RemedyComparison | None = None

    def lines(self) -> Iterator[str]:
        """Yield what it says, a line each."""
        less = 1 - self.shared / self.equal
        yield f"shares of microbatches: {self.shared:.6g} s an update instead of {self.equal:.6g} ({less:.1%} less)"
        if self.job is None:
            yield "other orders and detours: --job FILE compares them on the workers and links of a job's case"
        else:
            yield f"the job's case, from 1F1B: {self.job.best.kind.value} is best of {self.job}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values. Seconds of the job are in its case's unit; ``cost`` is paid once."""
        job = self.job and {
            "candidates": [
                {"kind": one.kind.value, "seconds": one.period, "bound": one.bound, "cost": one.cost, "what": one.what}
                for one in self.job.candidates
            ],
            "refused": {kind.value: why for kind, why in self.job.refused.items()},
            "choice": self.job.best.kind.value,
        }
        return {"equal": self.equal, "shared": self.shared, "job": job}


def reallocation(case: SynchronyCase, times: StepTimes, job: Case | None = None) -> Reallocation:
    """Return what moving work brings.

    Args:
        case: The case.
        times: Its drawn times of steps.
        job: The job's workers and links. Its replicas run 1F1B so far.

    Raises:
        CaseError: The job's case is of one pipeline, has lost workers, has another number of replicas, or its ranks have
            several stages.
    """
    equal = sum(map(max, times)) / len(times) + case.exchange
    shared = pace_of(Synchronous(), case, times).seconds
    if job is None:
        return Reallocation(equal, shared)
    if job.is_one_pipeline or job.replicas != case.replicas:
        raise CaseError(f"job {job.name}: {job.replicas} replicas: expected {case.replicas}, as in the case of the modes")
    if not is_straight(job.placement):
        raise CaseError(f"job {job.name}: placement {job.placement}: expected a rank for each stage, for 1F1B")
    running = join([one_f_one_b(job.stages, job.microbatches)] * job.replicas)
    return Reallocation(equal, shared, compare_remedies(job, running))
