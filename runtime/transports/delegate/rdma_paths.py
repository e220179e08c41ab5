"""RDMA ports as paths of the delegate, named for example ``rdma:mlx5_0/1``; other paths are named by an address of this
host.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from torch.distributed import Store

from adaptra import _C
from adaptra.errors import ControlError, LaunchError
from adaptra.runtime.control_store.stores import get_all
from adaptra.runtime.transports.delegate.endpoints import Endpoint

logger = logging.getLogger(__name__)

PREFIX: Final = "rdma:"
_MOST_PORTS: Final = 16


def listen(engine: _C.Engine, path: str) -> Endpoint:
    """Give the engine a path over an RDMA port, such as ``rdma:mlx5_0`` or ``rdma:mlx5_0/2``.

    Its TCP connections use the port's own network interface. So they fail with it, and the kernel knows the neighbour when
    queue pairs are connected.

    Raises:
        LaunchError: There is no such port here, or it can't be used; says why.
    """
    device, _, number = path.removeprefix(PREFIX).partition("/")
    if number and not (number.isascii() and number.isdigit()):
        raise LaunchError(f"path {path!r}: expected a device and a port's number, such as {PREFIX}mlx5_0/1")
    port = int(number or 1)
    ports, reason = _C.find_verbs_ports()
    address = next((found[2] for found in ports if found[:2] == (device, port)), "")
    try:
        return Endpoint("verbs", address, engine.add_verbs_path(device, port, address))
    except (RuntimeError, ValueError) as error:
        raise LaunchError(f"path {path}: {error}" + (f" ({reason})" if reason else "")) from error


def devices_of(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the RDMA devices among some paths, each once."""
    devices = (path.removeprefix(PREFIX).partition("/")[0] for path in paths if path.startswith(PREFIX))
    return tuple(dict.fromkeys(devices))


def agree_on_ports(store: Store, rank: int, world_size: int) -> list[str]:
    """Return this rank's usable RDMA ports as paths, limited to the number that every rank has. An edge joins them in order.

    Raises:
        ControlError: A rank's number of ports is malformed.
    """
    ports, reason = _C.find_verbs_ports()
    mine = [f"{PREFIX}{device}/{number}" for device, number, _, _, unusable in ports if not unusable][:_MOST_PORTS]
    store.set(f"rdma ports/{rank}", str(len(mine)))
    told = get_all(store, [f"rdma ports/{other}" for other in range(world_size)])
    counts = [_read_count(payload, other) for other, payload in enumerate(told)]
    if min(counts) < len(mine):
        fewest = counts.index(min(counts))
        logger.warning("rank %d: uses %d of its %d RDMA ports: rank %d has no more", rank, min(counts), len(mine), fewest)
    elif not mine:
        logger.info("rank %d: no RDMA: %s", rank, reason or "no port is usable, see adaptra doctor")
    return mine[: min(counts)]


def _read_count(payload: bytes, rank: int) -> int:
    text = payload.decode(errors="replace")
    if not (text.isascii() and text.isdigit() and int(text) <= _MOST_PORTS):
        raise ControlError(f"RDMA ports of rank {rank}: expected a number of at most {_MOST_PORTS}, got {text[:32]!r}")
    return int(text)
