"""Free memory of a pipeline's devices: the limit of later plans if the user gives none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from adaptra.errors import OptionError
from adaptra.runtime.control_store.schema import decode_all, encode
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.world.world import Place
from adaptra.sizes import size_text

_CGROUPS: Final = Path("/sys/fs/cgroup")


def free_memory(launched: Launch, devices: Mapping[int, torch.device], timeout: float) -> tuple[int, ...]:
    """Return the bytes that each rank of a pipeline may use: its device's free memory, divided by the ranks that share the
    device.

    With replicas the rank of the one with the least counts, because all replicas begin with the same plan. Under a launcher
    all ranks of the job call it together and get the same numbers.

    Args:
        launched: The ranks.
        devices: The device of each rank, where all are in this process; a process of one rank has that of its launch.
        timeout: Seconds to wait for the other ranks.

    Raises:
        LaunchError: Ranks have not answered; names them.
        ControlError: The store is lost.
    """
    device, world = launched.device, launched.world
    if launched.in_threads:
        sharing = Counter(map(_place, devices.values()))
        return tuple(free_on(each) // sharing[_place(each)] for _, each in sorted(devices.items()))
    own = encode({"place": _place(device), "free": free_on(device)})
    told = decode_all(launched.tell("free memory", own, timeout), "free memory")
    hosts = [(one.text("place"), one.whole("free")) for one in told]
    sharing = Counter(hosts[host][0] for host in world.hosts)
    shares = [free // sharing[place] for place, free in hosts]
    columns = [world.hosts_of(world.column(Place(place))) for place in range(world.places)]
    return tuple(min(shares[host] for host in column) for column in columns)


def require_host_memory(launched: Launch, needed: int, what: str, timeout: float, device: torch.device | None = None) -> None:
    """Refuse what does not fit the memory of a host. All ranks of the job call it together, and refuse it alike.

    Args:
        launched: The ranks.
        needed: The bytes that this process needs.
        what: What needs them, for the error's text.
        timeout: Seconds to wait for the other ranks.
        device: The device whose memory counts instead of the host's; all ranks give theirs, or none does.

    Raises:
        OptionError: It does not fit; names the host's ranks, the bytes needed and those that are free.
        LaunchError, ControlError: As :func:`free_memory`.
    """
    where, on = ("host", torch.device("cpu")) if device is None else ("device", device)
    own = encode({"place": _place(on), "needed": needed, "free": free_on(on)})
    told = decode_all(launched.tell("host memory", own, timeout), "host memory")
    for place in dict.fromkeys(one.text("place") for one in told):
        ranks = [rank for rank, one in enumerate(told) if one.text("place") == place]
        together, free = sum(told[rank].whole("needed") for rank in ranks), min(told[rank].whole("free") for rank in ranks)
        if together > free:
            raise OptionError(
                f"{what}: it needs {size_text(together)} of memory on the {where} of rank {', '.join(map(str, ranks))}, where "
                f"{size_text(free)} are free: expected that it fits"
            )


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
