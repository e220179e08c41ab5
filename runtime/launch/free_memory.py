"""Free memory of a pipeline's devices: the limit of later plans if the user gives none."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
from torch.distributed import DistError, DistStoreError, Store

from adaptra.errors import ControlError, LaunchError
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.launch.launch import Launch
from adaptra.runtime.world.world import Place

_CGROUPS: Final = Path("/sys/fs/cgroup")


def free_memory(launched: Launch, device: torch.device, timeout: float) -> tuple[int, ...]:
    """Return the bytes that each rank of a pipeline may use: its device's free memory, divided by the ranks that share the
    device.

    With replicas the rank of the one with the least counts, because all replicas begin with the same plan. Under a launcher
    all ranks of the job call it together and get the same numbers.

    Args:
        launched: The ranks.
        device: The device of this rank's model.
        timeout: Seconds to wait for the other ranks.

    Raises:
        LaunchError: Ranks have not answered; names them.
        ControlError: The store is lost.
    """
    free = free_on(device)
    if launched.job is None:
        return (free // len(launched.transports),) * len(launched.transports)
    found = _gather_by_rank(under("free memory", launched.records), launched.job.rank, [_place(device), free], timeout)
    sharing = Counter(place for place, _ in found)
    shares = [free // sharing[place] for place, free in found]
    world = launched.world
    columns = [world.hosts_of(world.column(Place(place))) for place in range(world.places)]
    return tuple(min(shares[rank] for rank in column) for column in columns)


def free_on(device: torch.device) -> int:
    """Return the free bytes of a device. Host memory is limited by the limits of this process's control groups."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:")]
    groups = Path("/proc/self/cgroup").read_text() if Path("/proc/self/cgroup").exists() else ""
    return min([1024 * int(line.split()[1]), *left_in_groups(groups, _CGROUPS)])


def left_in_groups(groups: str, root: Path) -> list[int]:
    """Return the bytes left in each of this process's control groups that has a limit.

    Args:
        groups: The text of ``/proc/self/cgroup``.
        root: The mount point of control groups.
    """
    left: list[int] = []
    for line in groups.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for one in (group, *group.parents):
            try:
                most, now = ((base / one / name).read_text().strip() for name in (limit, used))
            except OSError:
                continue
            left += [max(0, int(most) - int(now))] if most.isdigit() else []
    return left


def _place(device: torch.device) -> str:
    """Return a name of a device, the same on all ranks that use it and no others."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _gather_by_rank(store: Store, rank: int, own: list[str | int], timeout: float) -> list[tuple[str, int]]:
    """Gather the entry of every rank of the job, by rank. The first rank collects them, so that the others read one key
    only.
    """
    ranks = torch.distributed.get_world_size()
    keys = [str(one) for one in range(ranks)]
    try:
        store.set(str(rank), json.dumps(own))
        if rank == 0:
            store.wait(keys, timedelta(seconds=timeout))
            store.set("all", json.dumps([json.loads(store.get(key)) for key in keys]))
        store.wait(["all"], timedelta(seconds=timeout))
        return [(str(place), int(free)) for place, free in json.loads(store.get("all"))]
    except DistStoreError as error:
        absent = [key for key in keys if not store.check([key])]
        raise LaunchError(f"free memory: rank {', '.join(absent)} did not answer within {timeout:g} s") from error
    except DistError as error:
        raise ControlError(f"free memory: rank {rank} lost the control store: {error}") from error
