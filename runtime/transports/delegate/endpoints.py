"""The addresses of this host on which a rank listens, and the exchange of endpoints between the ranks of a job."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch.distributed import Store

from adaptra.errors import ControlError, LaunchError
from adaptra.runtime.control_store.schema import decode, encode
from adaptra.runtime.control_store.secret import VARIABLE, derive, given_secret
from adaptra.runtime.control_store.stores import get_all

SECRET_BYTES: Final = 32
_MAX_PATHS: Final = 64


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a path: the kind of wire, a numeric address of this rank's host, and the port on which it listens there."""

    wire: str
    host: str
    port: int


def address_towards(store: Store) -> str:
    """Return the address by which others reach this host, taken from the route to the store's host; loopback if that is this
    host.

    Raises:
        LaunchError: The store has no host, so addresses have to be given.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store  # pyright: ignore[reportAttributeAccessIssue] - torch's annotations lack it
    host = getattr(store, "host", None)
    if not isinstance(host, str):
        raise LaunchError(f"the job's {type(store).__name__} has no host: expected addresses=[...] of this host to listen on")
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    # Connecting a datagram socket sends nothing: it only looks up the route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def share_secret(store: Store, rank: int) -> bytes:
    """Return the key of the data links, the same on all ranks and a new one for each engine.

    If the launcher gave a secret, the key is derived from it, and the store has only a salt. Otherwise rank 0 makes the key and
    writes it to the store, where any client of the store can read it.

    Raises:
        LaunchError: This rank was given a secret and rank 0 not, or the other way round.
        ControlError: The value in the store is malformed.
    """
    secret = given_secret()
    if rank == 0:
        store.set("secret", encode({"given": secret is not None, "value": secrets.token_hex(SECRET_BYTES)}))
    fields = decode(store.get("secret"), "the job's secret")
    is_given, text = fields.flag("given"), fields.text("value", 2 * SECRET_BYTES)
    fields.end()
    if is_given != (secret is not None):
        who, other = ("rank 0", f"rank {rank}") if is_given else (f"rank {rank}", "rank 0")
        raise LaunchError(
            f"{who} was given a secret ({VARIABLE}), {other} was not: expected the same one on all ranks, or none"
        )
    try:
        value = bytes.fromhex(text)
    except ValueError as error:
        raise ControlError(f"the job's secret: expected {SECRET_BYTES} bytes in hexadecimal: {error}") from None
    if len(value) != SECRET_BYTES:
        raise ControlError(f"the job's secret: expected {SECRET_BYTES} bytes, got {len(value)}")
    return value if secret is None else derive(secret, "data links", value)


def share_session(store: Store, rank: int) -> bytes:
    """Return the session number of these ranks' connections, made by rank 0 and not secret.

    It separates them from all other connections with the same secret.
    """
    if rank == 0:
        store.set("session", secrets.token_hex(SECRET_BYTES))
    return store.get("session")


def share_endpoints(store: Store, rank: int, world_size: int, mine: Sequence[Endpoint]) -> list[list[Endpoint]]:
    """Send this rank's endpoints to all ranks, path by path, and return those of every rank.

    Raises:
        LaunchError: Ranks have different numbers or kinds of paths.
        ControlError: The endpoints of a rank are malformed.
    """
    paths = [{"wire": endpoint.wire, "host": endpoint.host, "port": endpoint.port} for endpoint in mine]
    store.set(f"endpoints/{rank}", encode({"paths": paths}))
    told = get_all(store, [f"endpoints/{other}" for other in range(world_size)])
    endpoints = [_read(payload, other) for other, payload in enumerate(told)]
    for other, theirs in enumerate(endpoints):
        if [endpoint.wire for endpoint in theirs] != [endpoint.wire for endpoint in mine]:
            raise LaunchError(
                f"rank {rank} has paths over {_describe(mine)}, rank {other} over {_describe(theirs)}: expected as many of the "
                "same kinds, since the paths of an edge join them in order"
            )
    return endpoints


def _read(payload: bytes, rank: int) -> list[Endpoint]:
    fields = decode(payload, f"endpoints of rank {rank}")
    read: list[Endpoint] = []
    for path in fields.objects("paths"):
        endpoint = Endpoint(path.text("wire", 16), path.text("host", 64), path.whole("port", 1))
        path.end()
        if endpoint.port > 0xFFFF:
            raise ControlError(f"endpoints of rank {rank}: port {endpoint.port}: expected at most 65535")
        read.append(endpoint)
    fields.end()
    if not 1 <= len(read) <= _MAX_PATHS:
        raise ControlError(f"endpoints of rank {rank}: {len(read)} paths: expected 1..{_MAX_PATHS}")
    return read


def _describe(endpoints: Sequence[Endpoint]) -> str:
    return " ".join(endpoint.wire for endpoint in endpoints)
