"""The roles of a job's ranks, taken from a DeviceMesh."""

from __future__ import annotations

from typing import Any

import torch

from adaptra.errors import OptionError
from adaptra.program.roles import Roles


def roles_of(mesh: Any, size: int, replicas: int | None) -> Roles:
    """Return the roles that a mesh gives to a job's ranks.

    The ``size`` ranks of a pipeline are along the mesh's dimension ``pp``, ``replicas`` along ``dp`` if it has one.

    Raises:
        OptionError: The mesh has other dimensions, another number of ranks along ``pp``, or not all ranks of the job. Or it has
            another number of replicas than is given.
    """
    names = getattr(mesh, "mesh_dim_names", None)
    if names not in (("pp",), ("dp", "pp"), ("pp", "dp")):
        raise OptionError(
            f"mesh={mesh!r}: expected a torch.distributed DeviceMesh whose mesh_dim_names are ('dp', 'pp'), or ('pp',)"
        )
    ranks = _by_replica(mesh)
    if ranks.shape[-1] != size:
        raise OptionError(f"mesh={mesh!r}: {ranks.shape[-1]} ranks along pp: expected {size}, as many as the pipeline has")
    count = ranks.numel() // size
    if replicas not in (None, count):
        raise OptionError(f"mesh={mesh!r}: {count} replicas: expected replicas={replicas}, as is given")
    job_ranks = tuple(ranks.flatten().tolist())
    if len(job_ranks) != (job := torch.distributed.get_world_size()):
        raise OptionError(f"mesh={mesh!r}: {len(job_ranks)} ranks in a job of {job}: expected a mesh of all ranks")
    return Roles(size, job_ranks)


def describe_mesh(mesh: Any) -> str:
    """Describe a mesh by its ranks, replica by replica; ``"None"`` for no mesh."""
    return "None" if mesh is None else str(_by_replica(mesh).flatten().tolist())


def _by_replica(mesh: Any) -> torch.Tensor:
    """Return the mesh's ranks with the dimension ``pp`` last."""
    return mesh.mesh.T if mesh.mesh_dim_names == ("pp", "dp") else mesh.mesh
