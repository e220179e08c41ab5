"""NCCL as the transport of a job's members, each with a GPU of its own, and the delegate beside it.

The delegate carries what is neither an activation nor a gradient of one, what goes to no neighbour, and the edges that turn
slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed
from torch.distributed import Store

from adaptra.errors import LaunchError
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.control_store.spare_clients import give_back
from adaptra.runtime.control_store.stores import clone
from adaptra.runtime.transports.delegate.engine import Timing
from adaptra.runtime.transports.delegate.join import join as join_delegate
from adaptra.runtime.transports.lanes import LanedTransport
from adaptra.runtime.transports.nccl.edges import Edge, edges_of
from adaptra.runtime.transports.nccl.nccl import NcclTransport
from adaptra.runtime.transports.process_groups import Members, end_keys, keys_of

DELEGATE = "delegate"
"""The lane of what NCCL doesn't carry."""


def join(
    members: Members | None = None,
    device: torch.device | str = "cpu",
    edges: Sequence[Edge] | None = None,
    addresses: Sequence[str] = (),
    timing: Timing | None = None,
) -> LanedTransport:
    """Return the transport of this rank; all members call it at the same time.

    Args:
        members: Those to join. None for all ranks of the default group.
        device: The GPU of sent and received tensors, which no other member uses.
        edges: Those of all members, in the order of :func:`.edges_of`. None for one straight pipeline of all members.
        addresses: The delegate's, see :func:`.delegate.join.join`.
        timing: The delegate's timeouts.

    Raises:
        LaunchError: The device is no GPU, or another member's too; or NCCL refuses to connect this rank. Says so on all members
            that it concerns.
    """
    check_device(torch.device(device))
    place = torch.empty(0, device=device).device  # with its number
    joined = members or Members.of_job()
    if edges is None:
        edges = edges_of(range(joined.size), [range(joined.size)])
    beside = join_delegate(joined, addresses, timing, place)
    mine = joined.part("nccl")
    meeting = clone(keys_of(mine.name))

    def end(is_whole: bool) -> None:
        if is_whole:
            end_keys(*mine)
            give_back(meeting)

    try:
        _refuse_shared(under("devices", beside.store), mine, place)
        try:
            healthy = NcclTransport(beside, mine, meeting, place, edges, end)
        except RuntimeError as error:
            raise LaunchError(f"transport 'nccl': NCCL can't connect rank {mine.rank}: {error}") from error
    except BaseException:
        beside.close()
        raise
    return LanedTransport(healthy, {DELEGATE: beside}, rest=DELEGATE)


def check_device(device: torch.device) -> None:
    """Refuse to train a model over NCCL where that can't be.

    Raises:
        LaunchError: The device is no GPU, or torch was built without NCCL.
    """
    if device.type != "cuda":
        raise LaunchError(
            f"transport 'nccl' with a model on {device}: expected one on a GPU of its own for each rank; leave transport= out"
        )
    if not distributed.is_nccl_available():
        raise LaunchError("transport 'nccl': this torch was built without NCCL: expected 'delegate', or leave transport= out")


def _refuse_shared(store: Store, members: Members, device: torch.device) -> None:
    """Refuse two members on one GPU. All of them refuse it alike, before NCCL hangs or refuses on some of them."""
    store.set(str(members.rank), str(torch.cuda.get_device_properties(device).uuid))
    users: dict[str, int] = {}
    for rank in range(members.size):
        uuid = store.get(str(rank)).decode(errors="replace")
        if uuid in users:
            raise LaunchError(
                f"transport 'nccl': ranks {users[uuid]} and {rank} are on one GPU: expected a GPU of its own for each rank, as "
                "NCCL refuses to share one; transport='delegate' shares it"
            )
        users[uuid] = rank
