"""The world that a job begins with, and the sites in it."""

from __future__ import annotations

from typing import Final, NamedTuple

from adaptra.checks import nearest_multiple
from adaptra.errors import LaunchError, OptionError
from adaptra.planning.synchrony.modes import Apart, Local, XOrder, check_mode
from adaptra.program.roles import Roles
from adaptra.runtime.world.world import Survival, World


class Wanted(NamedTuple):
    """What a job's first world is to be.

    Attributes:
        roles: The replica and stage of each rank of the job. Or the number of replicas: with fewer ranks than workers, ranks
            host several. None for as many replicas as consecutive ranks make.
        survives: How far the job goes on after the loss of processes.
        apart: How sites update by themselves; None where all replicas are one site.
    """

    roles: Roles | int | None = None
    survives: Survival = Survival.NOT
    apart: Apart | None = None


NO_WISH: Final = Wanted()
"""The world that consecutive ranks make."""


def sites_of(world: World, apart: Apart | None) -> int:
    """Return the number of sites that a world's replicas make up in a mode; one where every update has all gradients.

    Raises:
        OptionError: They can't; says why.
    """
    if apart is None:
        return 1
    check_mode(apart, world.replicas)
    if isinstance(apart, XOrder) and apart.x == world.replicas:
        return 1  # all of them are exact
    if world.has_guests:
        raise OptionError(
            f"{apart!r} with {len(world.processes)} ranks for {len(world.hosts)} workers: expected a rank for each worker, as "
            "the workers of a rank have the same parameters, and those of sites differ"
        )
    return (apart.sites if isinstance(apart, Local) else None) or world.replicas


def first_world(size: int, ranks: int, roles: Roles | int | None, transport: str) -> World:
    """Return the job's first world.

    Raises:
        LaunchError: The ranks don't make such a job; says what to change.
    """
    if isinstance(roles, Roles):
        return World.of_roles(roles)
    if roles is None and ranks % size:
        raise LaunchError(
            f"{ranks} ranks for a pipeline of {size}: expected a multiple of {size} ranks (more make data-parallel replicas); "
            f"start {nearest_multiple(ranks, size)} processes, ask for another number of stages, or give replicas= to have "
            "some ranks host several workers"
        )
    count = ranks // size if roles is None else roles
    least, most = max(size, count), count * size
    if not least <= ranks <= most:
        raise LaunchError(
            f"{ranks} ranks for replicas={count} of {size} ranks: expected {least} to {most}: each of its {most} workers needs "
            "one, which may host others of the same stages, and each replica one that is given its batch"
        )
    if ranks < most and transport == "nccl":
        raise LaunchError(
            f"transport 'nccl' with {ranks} ranks for {most} workers: expected transport='delegate', as NCCL takes a GPU once"
        )
    try:
        return World.of_fewer(ranks, size, count)
    except OptionError as error:
        raise LaunchError(str(error)) from error
