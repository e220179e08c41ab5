"""The started engine of one rank: it listens on the rank's paths, and knows the other ranks' endpoints and clocks.

Ranks exchange this knowledge (the endpoints, the job's secret) through the job's store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed import Store

from adaptra import _C
from adaptra.errors import LaunchError
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.transports import clock_offset as clock
from adaptra.runtime.transports.delegate import rdma_paths
from adaptra.runtime.transports.delegate.endpoints import Endpoint, share_endpoints, share_secret, share_session
from adaptra.runtime.transports.delegate.engine_memory import compare_clocks


@dataclass(frozen=True, slots=True)
class Timing:
    """Timeouts of the delegate, in seconds.

    Attributes:
        heartbeat: The interval between heartbeats on each connection.
        silence: The time without a heartbeat after which a path has failed.
        healthy_for: The time for which a better path must have been up before messages return to it.
        lost_after: The time without any path after which the edge fails.
        handshake: The time in which a new connection has to prove that it belongs to the job.
    """

    heartbeat: float = 0.2
    silence: float = 0.8
    healthy_for: float = 1.0
    lost_after: float = 10.0
    handshake: float = 3.0


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """A rank's engine, started, and its knowledge of the other ranks.

    Attributes:
        engine: Exchanges messages with every other rank.
        rank: This rank.
        world_size: The number of ranks.
        store: The job's store.
        clock_offsets: For every rank, how far its clock is ahead of this one's, with the uncertainty; seconds.
        rdma_devices: The RDMA devices among its paths.
    """

    engine: _C.Engine
    rank: int
    world_size: int
    store: Store
    clock_offsets: tuple[clock.Offset, ...]
    rdma_devices: tuple[str, ...]


Listen = Callable[[_C.Engine, str], Endpoint]
"""Makes an engine listen on one address, and returns the endpoint by which others reach it."""


def listen(engine: _C.Engine, address: str) -> Endpoint:
    """Give the engine its next path: over an RDMA port such as ``rdma:mlx5_0/1``, or else TCP on a numeric address.

    Raises:
        LaunchError: The address is not one of this host's.
    """
    if address.startswith(rdma_paths.PREFIX):
        return rdma_paths.listen(engine, address)
    try:
        return Endpoint("tcp", address, engine.add_tcp_path(address))
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"addresses: can't listen on {address!r}: {error}: expected numeric addresses of this rank's host"
        ) from error


def start_engine(
    rank: int, world_size: int, store: Store, addresses: Sequence[str], timing: Timing, listen: Listen
) -> StartedEngine:
    """Start the engine of one rank; all ranks do so at the same time.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        store: The job's store, for the engine and its users.
        addresses: One per path, in the order of preference: a numeric address of this host for TCP, an RDMA port such as
            ``rdma:mlx5_0/1`` for verbs. Connections are accepted on these only. All ranks give equally many of the same kinds.
        timing: The timeouts.
        listen: As :func:`listen`, unless others reach this rank by another endpoint than the one that it listens on.

    Raises:
        LaunchError: An address is not one of this host's, the ranks' paths don't match, or a neighbour can't be reached.
    """
    control = under("delegate", store)
    engine = _C.Engine(
        rank,
        world_size,
        share_secret(control, rank),
        heartbeat=timing.heartbeat,
        silence=timing.silence,
        healthy_for=timing.healthy_for,
        lost_after=timing.lost_after,
        handshake=timing.handshake,
        session=share_session(control, rank),
    )
    mine = [listen(engine, address) for address in addresses]
    for peer, endpoints in enumerate(share_endpoints(control, rank, world_size, mine)):
        if peer != rank:
            engine.set_peer(peer, [(endpoint.host, endpoint.port) for endpoint in endpoints])
    engine.start()
    clock_offsets = compare_clocks(engine, rank, world_size, under("clock", control))
    return StartedEngine(engine, rank, world_size, store, clock_offsets, rdma_paths.devices_of(addresses))
