"""The ranks that agree on plans, and which of them this one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgreeingRanks:
    """The ranks that agree on one plan log: those of a pipeline, or all workers of a job.

    Attributes:
        rank: This rank among them.
        count: The number of them.
        pipeline: The ranks of this rank's pipeline among them; all of them by default.
        job_ranks: The numbers of the pipeline's ranks in the job, if these differ; errors use them.
    """

    rank: int
    count: int
    pipeline: range = range(0)
    job_ranks: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "pipeline", self.pipeline or range(self.count))

    @property
    def place(self) -> int:
        """This rank within its pipeline."""
        return self.pipeline.index(self.rank)
