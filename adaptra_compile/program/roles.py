"""Roles: the place in a pipeline and the data-parallel replica of each rank of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adaptra.errors import OptionError


@dataclass(frozen=True, slots=True)
class Roles:
    """One role, a place in a replica's pipeline, for every rank of a job.

    The place is a stage, or a rank's number in its pipeline if ranks have several stages. Those move together.

    Attributes:
        stages: The number of places of each replica's pipeline.
        ranks: ``ranks[replica * stages + stage]`` is the rank of that role. Every rank of the job has one role.

    Raises:
        OptionError: Ranks are missing, or have two roles, or don't make whole replicas.
    """

    stages: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.stages < 1 or len(self.ranks) % self.stages or sorted(self.ranks) != list(range(len(self.ranks))):
            raise OptionError(
                f"roles {list(self.ranks)} for {self.stages} stages: expected each rank of the job once, in whole replicas"
            )

    @staticmethod
    def initial(ranks: int, stages: int) -> Roles:
        """Return the initial roles of a job: each replica's stages are on consecutive ranks."""
        return Roles(stages, tuple(range(ranks)))

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return len(self.ranks) // self.stages

    def of(self, rank: int) -> tuple[int, int]:
        """Return a rank's replica and stage."""
        return divmod(self.ranks.index(rank), self.stages)

    def pipeline(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of a replica's pipeline, by stage."""
        return self.ranks[replica * self.stages : (replica + 1) * self.stages]

    def column(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that have copies of a stage and average its gradients, by replica."""
        return self.ranks[stage :: self.stages]

    def swapped(self, one: int, other: int) -> Roles:
        """Return these roles with those of two ranks swapped."""
        exchange = {one: other, other: one}
        return replace(self, ranks=tuple(exchange.get(rank, rank) for rank in self.ranks))

    def successor(self, rank: int, following: Roles) -> int:
        """Return the rank that has ``rank``'s role in ``following``."""
        return following.ranks[self.ranks.index(rank)]


def moved(before: Roles, after: Roles) -> Sequence[int]:
    """Return the ranks whose roles change."""
    return [rank for rank in sorted(before.ranks) if before.of(rank) != after.of(rank)]
