"""The ranks of a pipeline: threads of this process, or the processes that a launcher such as torchrun started."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
import torch.distributed as dist

from adaptra.errors import LaunchError
from adaptra.planning.synchrony.modes import check_mode
from adaptra.runtime.control_store.secret import VARIABLE, fingerprint, given_secret
from adaptra.runtime.control_store.spare_clients import Reservation
from adaptra.runtime.control_store.stores import rank_0_has
from adaptra.runtime.launch.arguments import agree_on_arguments
from adaptra.runtime.launch.carriers import NO_DELEGATE, Carriers, DelegateSetup
from adaptra.runtime.launch.environment import is_told_of_others
from adaptra.runtime.launch.first_world import NO_WISH, Wanted, first_world, sites_of
from adaptra.runtime.launch.job import Job, Launch, OneProcess
from adaptra.runtime.launch.several_hosts import check_launcher
from adaptra.runtime.membership.process_membership import ProcessMembership
from adaptra.runtime.transports.nccl.join import check_device
from adaptra.runtime.transports.process_groups import (
    job_store,
    keys_of,
    sweep,
)
from adaptra.runtime.world.world import Survival, World

logger = logging.getLogger(__name__)

HOST: Final = torch.device("cpu")
_ADOPTED: Final = 3
"""The workers that a process has clients of the store for, beside those that it hosts from the start."""


def is_launched() -> bool:
    """Return True if this process is one of several that a launcher started or that have joined a process group.

    Raises:
        LaunchError: See :func:`.environment.is_told_of_others`.
    """
    if not dist.is_available():
        return False
    return dist.is_initialized() or dist.is_torchelastic_launched() or is_told_of_others(os.environ)


def world_size() -> int:
    """Return the number of ranks of the job, also before they have met; 1 without a launcher."""
    if not is_launched():
        return 1
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def launch(
    size: int,
    transport: str | None,
    arguments: Mapping[str, str],
    timeout: float,
    *,
    device: torch.device = HOST,
    placement: Sequence[int] | None = None,
    delegate: DelegateSetup = NO_DELEGATE,
    wanted: Wanted = NO_WISH,
) -> Launch:
    """Find the ranks of a pipeline. Under a launcher all ranks call it at the same time.

    Args:
        size: The number of ranks of the pipeline.
        transport: ``"local"``, ``"c10d"``, ``"delegate"``, ``"nccl"``, the name of an installed transport, or None. None is
            local without a launcher, else c10d between hosts' memory and the delegate between GPUs.
        arguments: The user's arguments by name, which the ranks compare first.
        timeout: Seconds to wait for the other ranks.
        device: The device on which this process trains.
        placement: The place of each stage in its pipeline; None for one on each.
        delegate: How the delegate is set up.
        wanted: The replicas and sites of the job, and how far it survives.

    Raises:
        OptionError: Its replicas can't be such sites; says why.
        LaunchError: The job can't survive a loss; says why.
        LaunchError: The delegate is requested beside a transport other than c10d and NCCL. Or NCCL is for a model that is on no
            GPU. Or the ranks don't make ``replicas`` of ``size``, or are not a multiple of it; says what to change. Or a rank
            has other arguments or has not come; names it.
        PeerLostError: A rank failed or died while the ranks connected; names it.
    """
    roles, survives, apart = wanted
    goes_on = survives is not Survival.NOT
    between = "delegate" if goes_on or (device.type == "cuda" and not delegate.is_beside) else "c10d"
    name = transport or (between if is_launched() else "local")
    if delegate.is_beside and name not in ("c10d", "nccl"):
        raise LaunchError(
            f"Options(delegate=...) with transport {name!r}: expected c10d or nccl, whose slow edges the delegate takes over"
        )
    if name == "nccl":
        check_device(device)
    if name == "local" and not goes_on:
        return _in_threads(size, device, wanted)
    if goes_on and name != "delegate":
        raise LaunchError(
            f"Options(survive=True) with transport {name!r}: expected several processes over 'delegate', whose connections "
            "begin anew without a lost rank"
        )
    if not is_launched():
        raise LaunchError(
            f"transport {name!r} needs {size} processes: start this script with torchrun --nproc-per-node={size}, or call "
            "torch.distributed.init_process_group yourself; without a launcher use transport='local'"
        )
    if not dist.is_initialized():
        check_launcher(os.environ, socket.gethostname())
        dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    in_a_column = max(1, ranks // size)
    replicas = roles if isinstance(roles, int) else in_a_column
    hosted = -(-replicas // in_a_column)
    carriers = Carriers(name, delegate, device, tuple(range(size)) if placement is None else placement)
    most = min(hosted + _ADOPTED, replicas) if goes_on else hosted
    spares = Reservation(carriers.clients(most, survives=goes_on))
    # Making groups waits for all ranks, so the ranks first agree on which groups to make.
    keys = f"adaptra launch {job_store().add(f'adaptra launches/{rank}', 1)}"
    contributed = agree_on_arguments(keys_of(keys), rank, ranks, {**arguments, VARIABLE: fingerprint(given_secret())}, timeout)
    if rank == 0:
        sweep()
    world = replace(first_world(size, ranks, roles, name), needs_homes=survives is not Survival.WITHOUT_HOMES)
    if apart is not None:
        world = replace(world, sites=sites_of(world, apart))
    if goes_on and rank == 0 and rank_0_has(job_store()):
        logger.warning(
            "Options(survive=True): rank 0 has the job's store, so its loss ends the job: start the processes by adaptra run, "
            "whose supervisor has the store"
        )
    if goes_on and world.replicas == 1:
        raise LaunchError(
            f"Options(survive=True) with {ranks} ranks for one replica of {size}: expected several replicas, as those of other "
            "replicas go on with a lost rank's stages"
        )
    averages = world.replicas > 1 or world.hosts != tuple(range(size))
    job = Job(carriers, keys, contributed, timeout, spares, averages, world if goes_on else None)
    try:
        return job.enter(world)
    except BaseException:
        job.membership.close()
        raise


def _in_threads(size: int, device: torch.device, wanted: Wanted) -> Launch:
    """Join threads of this process.

    Raises:
        LaunchError: Several replicas are wanted.
        OptionError: Sites are wanted.
    """
    if isinstance(wanted.roles, int) and wanted.roles != 1:
        raise LaunchError(
            f"replicas={wanted.roles}: expected 1 without a launcher; start {size} to {wanted.roles * size} processes"
        )
    world = World.of_threads(size)
    if wanted.apart is not None:
        check_mode(wanted.apart, world.replicas)
    return OneProcess(ProcessMembership(), device).enter(world)
