"""Where the ranks of a pipeline are: threads of this process, or the processes that a launcher such as torchrun started."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistStoreError

from adaptra.errors import LaunchError
from adaptra.runtime.replicas import Replicas
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.transports.local import LocalHub
from adaptra.runtime.transports.registry import create_transport


@dataclass(frozen=True, slots=True)
class Launch:
    """The ranks of one pipeline that this process runs.

    Attributes:
        transports: One per rank run here, by rank: all of them as threads, or the one of this process.
        replicas: This process's peers in other pipelines, or None without data parallelism.
    """

    transports: tuple[Transport, ...]
    replicas: Replicas | None = None


def launch(stages: int, transport: str | None) -> Launch:
    """Find the ranks of a pipeline.

    Args:
        stages: Stages of the pipeline; one rank holds one stage.
        transport: ``"local"``, ``"c10d"``, the name of an installed transport, or None: c10d under a launcher, else local.

    Raises:
        LaunchError: The number of ranks is not a multiple of the number of stages; says what to change.
    """
    is_launched = dist.is_available() and (dist.is_initialized() or dist.is_torchelastic_launched())
    name = transport or ("c10d" if is_launched else "local")
    if name == "local":
        hub = LocalHub(stages)
        return Launch(tuple(hub.transport(rank) for rank in range(stages)))
    if not is_launched:
        raise LaunchError(
            f"transport {name!r} needs {stages} processes: start this script with torchrun --nproc-per-node={stages}, or call "
            "torch.distributed.init_process_group yourself; without a launcher use transport='local'"
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    if ranks % stages:
        raise LaunchError(
            f"{ranks} ranks for {stages} stages: expected a multiple of {stages} ranks (more make data-parallel replicas); "
            f"start {_nearest_multiple(ranks, stages)} processes or ask for another number of stages"
        )
    if ranks == stages:
        return Launch((create_transport(name, group=None),))
    # Every rank makes every group, in the same order, as torch.distributed asks for.
    pipelines = [_new_group(range(first, first + stages)) for first in range(0, ranks, stages)]
    columns = [_new_group(range(stage, ranks, stages)) for stage in range(stages)]
    replica, stage = divmod(dist.get_rank(), stages)
    return Launch((create_transport(name, group=pipelines[replica]),), Replicas(columns[stage]))


def _new_group(ranks: range) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _nearest_multiple(ranks: int, stages: int) -> int:
    return max(1, round(ranks / stages)) * stages


def agree(transport: Transport, what: str, facts: object, timeout: float) -> None:
    """Make sure that every rank of the pipeline holds the same facts. All ranks call it.

    Args:
        transport: This rank's transport; its store carries the comparison.
        what: What the facts are, for the error; each comparison has a name of its own.
        facts: Anything JSON can hold.
        timeout: Seconds to wait for the other ranks.

    Raises:
        LaunchError: Ranks differ; names them.
    """
    text = json.dumps(facts, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    found = _exchange(transport, f"agree/{what}", digest, range(transport.world_size), timeout)
    different = [rank for rank, other in enumerate(found) if other != found[0]]
    if different:
        raise LaunchError(
            f"{what}: rank {', '.join(map(str, different))} compiled something else than rank 0: expected every rank to build "
            "the same model and to call adaptra.compile with the same arguments"
        )


def gather(transport: Transport, what: str, data: object, timeout: float) -> list[object] | None:
    """Bring what every rank holds to rank 0. All ranks call it.

    Args:
        transport: This rank's transport; its store carries the data.
        what: A name that no other call uses.
        data: Anything JSON can hold.
        timeout: Seconds to wait for the other ranks.

    Returns:
        The data by rank on rank 0, None elsewhere.
    """
    wanted = range(transport.world_size) if transport.rank == 0 else range(0)
    found = _exchange(transport, f"gather/{what}", json.dumps(data), wanted, timeout)
    return [json.loads(text) for text in found] if transport.rank == 0 else None


def _exchange(transport: Transport, name: str, text: str, wanted: Sequence[int], timeout: float) -> list[str]:
    """Publish this rank's text under a name and read those of the wanted ranks."""
    store = transport.store
    store.set(f"{name}/{transport.rank}", text)
    keys = [f"{name}/{rank}" for rank in wanted]
    if not keys:
        return []
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except DistStoreError as error:
        absent = [rank for rank, key in zip(wanted, keys, strict=True) if not store.check([key])]
        raise LaunchError(f"{name}: rank {', '.join(map(str, absent))} did not answer within {timeout:g} s") from error
    return [store.get(key).decode() for key in keys]
