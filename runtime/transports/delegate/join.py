"""The delegate as the transport of a job's members."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed

from adaptra.runtime.control_store.spare_clients import give_back
from adaptra.runtime.transports.delegate import rdma_paths
from adaptra.runtime.transports.delegate.delegate import DelegateTransport
from adaptra.runtime.transports.delegate.endpoints import address_towards
from adaptra.runtime.transports.delegate.engine import Listen, Timing, listen, start_engine
from adaptra.runtime.transports.delegate.gpu import GpuDelegateTransport
from adaptra.runtime.transports.process_groups import Members, control_plane, end_keys, initialise, keys_of


def join(
    members: Members | None = None,
    addresses: Sequence[str] = (),
    timing: Timing | None = None,
    device: torch.device | str = "cpu",
    listen: Listen = listen,
) -> DelegateTransport:
    """Return the delegate of this rank; all members call it at the same time.

    Args:
        members: Those to join. None for all ranks of the default group, which is set up from the launcher's environment if it
            does not exist.
        addresses: One per path, see :func:`.engine.start_engine`; () for the usable RDMA ports of this host, followed by the
            address by which it reaches the store.
        timing: The timeouts.
        device: The device of sent and received tensors: the host, or a GPU.
        listen: See :func:`.engine.start_engine`.

    Raises:
        LaunchError: There is no group and no launcher, or see :func:`.engine.start_engine`.
    """
    owns_default = members is None and initialise("gloo")
    joined, place = (members or Members.of_job()).part("delegate"), torch.device(device)
    name, rank, size = joined
    store = control_plane(joined)
    found = addresses or [*rdma_paths.agree_on_ports(store, rank, size), address_towards(keys_of(name))]
    started = start_engine(rank, size, store, found, timing or Timing(), listen)

    def end() -> None:
        end_keys(*joined)
        give_back(store)
        if owns_default:
            distributed.destroy_process_group()

    if place.type == "cuda":
        return GpuDelegateTransport(started, end, place)
    return DelegateTransport(started, end)
