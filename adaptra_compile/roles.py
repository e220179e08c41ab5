"""Roles: which stage of which data-parallel replica each rank of a job holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from adaptra.errors import OptionError


@dataclass(frozen=True, slots=True)
class Roles:
    """One role, a stage of a replica, for every rank of a job.

    Attributes:
        stages: Stages of each replica's pipeline.
        ranks: ``ranks[replica * stages + stage]`` is the rank of that role; every rank of the job has one.

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
        """The roles a job starts with: each replica's stages lie on consecutive ranks."""
        return Roles(stages, tuple(range(ranks)))

    @staticmethod
    def of_mesh(mesh: Any, stages: int) -> Roles:
        """The roles that a DeviceMesh gives: stages lie along its dimension ``pp``, replicas along ``dp`` if it has one.

        Raises:
            OptionError: It has other dimensions, another number of stages, or not all ranks of the job.
        """
        names = getattr(mesh, "mesh_dim_names", None)
        if names not in (("pp",), ("dp", "pp"), ("pp", "dp")):
            raise OptionError(
                f"mesh={mesh!r}: expected a torch.distributed DeviceMesh whose mesh_dim_names are ('dp', 'pp'), or ('pp',)"
            )
        ranks = mesh.mesh.T if names == ("pp", "dp") else mesh.mesh
        if ranks.shape[-1] != stages:
            raise OptionError(
                f"mesh={mesh!r}: {ranks.shape[-1]} ranks along pp with stages={stages}: expected one for every stage"
            )
        found = tuple(ranks.flatten().tolist())
        if len(found) != (job := torch.distributed.get_world_size()):
            raise OptionError(f"mesh={mesh!r}: {len(found)} ranks in a job of {job}: expected a mesh of all ranks")
        return Roles(stages, found)

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return len(self.ranks) // self.stages

    def of(self, rank: int) -> tuple[int, int]:
        """A rank's replica and stage."""
        return divmod(self.ranks.index(rank), self.stages)

    def pipeline(self, replica: int) -> tuple[int, ...]:
        """The ranks of a replica's pipeline, by stage."""
        return self.ranks[replica * self.stages : (replica + 1) * self.stages]

    def column(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold copies of a stage and average its gradients, by replica."""
        return self.ranks[stage :: self.stages]

    def swapped(self, one: int, other: int) -> Roles:
        """These roles, but two ranks have each other's."""
        exchange = {one: other, other: one}
        return replace(self, ranks=tuple(exchange.get(rank, rank) for rank in self.ranks))

    def successor(self, rank: int, following: Roles) -> int:
        """The rank that has, among the ``following`` roles, the one that ``rank`` has here."""
        return following.ranks[self.ranks.index(rank)]


def moved(before: Roles, after: Roles) -> Sequence[int]:
    """The ranks whose role changes."""
    return [rank for rank in sorted(before.ranks) if before.of(rank) != after.of(rank)]
