"""Checks of what torchrun has told this process about other hosts, before the process waits for them.

gloo and torchrun notice these mistakes late or not at all. A host that gives the others its own loopback's address waits for
half an hour. A job that starts again may read addresses that its last attempt has left in the store.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Mapping
from typing import Final

from adaptra.errors import LaunchError

_log = logging.getLogger(__name__)
LOOPBACK: Final = "lo"


def check_launcher(environment: Mapping[str, str], host: str) -> None:
    """Check what torchrun has told this process, before torch.distributed is set up with gloo.

    Args:
        environment: This process's environment variables.
        host: This host's name, by which gloo finds the address that it gives other hosts.

    Raises:
        LaunchError: Other hosts can't reach the address that gloo would give them, or its interface is not there.
    """
    _check_address(environment, host)
    _warn_of_old_keys(environment)


def _check_address(environment: Mapping[str, str], host: str) -> None:
    rank = environment.get("RANK", "?")
    chosen = [name for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    present = [name for _, name in socket.if_nameindex()]
    if unknown := [name for name in chosen if name not in present]:
        raise LaunchError(
            f"rank {rank}: GLOO_SOCKET_IFNAME={','.join(chosen)!r} names {unknown[0]!r}: expected a network interface of this "
            f"host, {host!r}: {', '.join(present)}"
        )
    ranks, here = (int(environment.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    first = environment.get("MASTER_ADDR", "localhost")
    if ranks <= here or chosen not in ([], [LOOPBACK]) or _own_address(first) is not None:
        return
    address = "127.0.0.1" if chosen else _gloo_address(host)
    if ipaddress.ip_address(address).is_loopback:
        raise LaunchError(
            f"rank {rank}: gloo would give other hosts the address {address} of {LOOPBACK if chosen else host!r}, and rank 0 "
            f"is on another host, {first}: expected GLOO_SOCKET_IFNAME to name the network interface that reaches the other "
            f"hosts, on each host its own: {', '.join(name for name in present if name != LOOPBACK)}"
        )


def _warn_of_old_keys(environment: Mapping[str, str]) -> None:
    may_restart = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    if may_restart and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment.get("RANK") == "0":
        _log.warning(
            "torchrun --max-restarts: a restarted job shares its store with the attempt before and may read addresses from it: "
            "connections are then refused, and the attempt fails; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, with "
            "--standalone or --rdzv-backend=c10d"
        )


def _gloo_address(host: str) -> str:
    """Return the address that gloo gives other hosts: the first of this host's name that is this host's, else loopback."""
    return _own_address(host) or "127.0.0.1"


def _own_address(name: str) -> str | None:
    """Return the first address of a name that this host has, or None."""
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as tried:
                tried.bind(address)
        except OSError:
            continue
        return str(address[0])
    return None
