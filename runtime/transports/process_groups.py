"""The process groups that transports and sums over replicas are built on: made under unique names, and ended.

Those that torch.distributed records belong to all ranks of the job, for its life. These belong to their members alone, which
are those of a world, and end with it. Every group is named by its user, and no name is used twice.

A group's keys lie in the job's store under its name. Each member records in the store that it has ended the group. It does not
wait for an answer, because the store may be gone by then. When the ranks meet again, :func:`sweep` removes the keys of groups
that all members have ended.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch import distributed
from torch.distributed import DistError, PrefixStore, ProcessGroup, Store, distributed_c10d

from adaptra.errors import LaunchError
from adaptra.runtime.control_store.forked_children import keep_store_from_children, kept_from_children
from adaptra.runtime.control_store.signed_store import signed_together
from adaptra.runtime.control_store.spare_clients import Part, client_of_groups
from adaptra.runtime.control_store.stores import clone
from adaptra.runtime.transports.base import ChannelClass

# The membership detects lost ranks: a wait for a message may last as long as its sender lives.
FOR_EVER: Final = timedelta(days=7)

_LAZY: Final = "TORCH_GLOO_LAZY_INIT"
"""The environment variable by which torch has gloo's members meet at a message instead."""
_ENDED: Final = "adaptra ended"
_PROBE_TAG: Final = 2**31 - 2
"""The tag of messages that nobody receives."""
_thread: Final = threading.local()


@contextlib.contextmanager
def own_client() -> Generator[None]:
    """Have groups that this thread makes within this context meet by a client of their own.

    Where several threads of a process make groups at once, one would wait on a common client for what the other has to write.
    """
    _thread.client = clone(job_store())
    try:
        yield
    finally:
        del _thread.client


def initialise(backend: str) -> bool:
    """Set up the default group from the launcher's environment, unless there is one.

    Returns:
        True if this call set it up.
    """
    if distributed.is_initialized():
        return False
    try:
        with kept_from_children():
            distributed.init_process_group(backend)
    except ValueError as error:
        raise LaunchError(f"no process group and no launcher such as torchrun: {error}") from error
    return True


class Members(NamedTuple):
    """One of the members that join under a name: the workers of a world, or its processes.

    Attributes:
        name: The same for all of them, and no other's of this job.
        rank: This one's number among them.
        size: Their number.
    """

    name: str
    rank: int
    size: int

    @staticmethod
    def of_job() -> Members:
        """Return this process among all of the job's, under a new name. All of them call it equally often."""
        rank = distributed.get_rank()
        count = job_store().add(f"adaptra parts/{rank}", 1)
        return Members(f"adaptra/job/{count}", rank, distributed.get_world_size())

    def part(self, name: str) -> Members:
        """Return the same members under a name within theirs."""
        return self._replace(name=f"{self.name}/{name}")


def collectives_of_user(processes: Collection[int]) -> int:
    """Return how many collectives the user's code has called in this process, over groups that hold all these processes.

    Only differences tell something. With gloo, messages between two processes of such a group count too. A backend without
    sequence numbers tells nothing. torch.distributed has no record of adaptra's own groups.
    """
    internals: Any = distributed_c10d
    count = 0
    for group, rank_of in internals._world.pg_group_ranks.items():
        if all(process in rank_of for process in processes):
            with contextlib.suppress(RuntimeError):
                count += group._get_sequence_number_for_group()
    return count


def new_group(members: Members, backend: str | None = None, timeout: timedelta | None = None) -> ProcessGroup:
    """Make a group that torch.distributed has no record of: it has methods alone. Each member calls it.

    So the members may be any that reach the store, several of one process too.

    Args:
        members: This member of them.
        backend: The name of the backend in torch.distributed, or None for the job's own.
        timeout: The timeout of its operations, or None for the backend's own.

    Raises:
        LaunchError: The backend is neither gloo nor NCCL, nor both.
    """
    internals: Any = distributed_c10d
    backend = distributed.Backend(backend or distributed.get_backend())
    of_device: dict[str, str] = internals.BackendConfig(backend).get_device_backend_map()
    kinds = internals.Backend.backend_type_map
    name, rank, size = members
    with kept_from_children():
        store = PrefixStore(f"{name}/", _client_for(str(backend)))
        group: Any = ProcessGroup(store, rank, size)
        group._set_default_backend(kinds["nccl" if "nccl" in of_device.values() else "gloo"])
        backends = {
            one: _backend(one, PrefixStore(f"{one}/", store), members, timeout) for one in dict.fromkeys(of_device.values())
        }
        for device, one in of_device.items():
            group._register_backend(torch.device(device), kinds[one], backends[one])
        group._set_group_name(name)
    keep_store_from_children(store)
    return group


def new_group_of_user(members: Members, processes: Collection[int]) -> ProcessGroup:
    """Make a group of gloo that torch.distributed has a record of, as its ``new_group`` does. Each member calls it.

    That names a group by how many a process has. It waits for a missing member by the job's own client of the store, for half
    an hour.

    Args:
        members: This member of them.
        processes: The members' ranks in the job.
    """
    internals: Any = distributed_c10d
    store, timeout = _client_for("gloo"), internals._get_default_timeout("gloo")
    ranks, backend = list(map(int, processes)), distributed.Backend("gloo")
    with kept_from_children():
        group, _ = internals._new_process_group_helper(
            members.size, members.rank, ranks, backend, store, members.name, timeout=timeout
        )
    keep_store_from_children(store)
    internals._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


def _backend(name: str, store: Store, members: Members, timeout: timedelta | None) -> distributed.Backend:
    internals: Any = distributed_c10d
    timeout = timeout or internals._get_default_timeout(name)
    if name == "gloo":
        return internals.ProcessGroupGloo(store, members.rank, members.size, timeout=timeout)
    if name == "nccl" and distributed.is_nccl_available():
        options = internals.ProcessGroupNCCL.Options()
        options._timeout, options.group_name = timeout, members.name
        return internals.ProcessGroupNCCL(store, members.rank, members.size, options)
    raise LaunchError(f"init_process_group({name!r}): expected gloo or NCCL, over which replicas average gradients")


def end_group(group: ProcessGroup) -> None:
    """End a group, whose descriptors, threads and memory end with the last reference to it. Each member calls it."""
    group.shutdown()
    end_keys(group.group_name, group.rank(), group.size())


def is_gloo(group: ProcessGroup) -> bool:
    """Return whether gloo alone carries a group's tensors, of whatever device."""
    return _backends_of(group) == {"gloo"}


def from_rank(rank: int) -> distributed.BroadcastOptions:
    """Return the options of a broadcast of a rank's values."""
    options = distributed.BroadcastOptions()
    options.rootRank = rank
    return options


def _backends_of(group: ProcessGroup) -> set[str]:
    of: Any = group
    return {of._get_backend(device).name() for device in of._device_types}


def _client_for(backend: str) -> Store:
    """Return a client of the job's store by which a group's members meet.

    The wait for a member blocks all users of a client. Groups of gloo only wait while they are made, which is one after the
    other, so they share one.
    """
    own: Store | None = getattr(_thread, "client", None)
    if own is not None:
        return own
    shared = client_of_groups() if backend == "gloo" and not meets_lazily() else None
    return clone(job_store()) if shared is None else shared


def meets_lazily() -> bool:
    """Return whether the members of a group of gloo connect at their first message, and not when they make it."""
    return os.environ.get(_LAZY, "0").lower() not in ("", "0", "false", "n", "no", "off")


def job_store() -> Store:
    """Return the store of the default group."""
    assert distributed.group.WORLD is not None, "the job's ranks have joined"
    return distributed.group.WORLD.get_group_store()


def keys_of(name: str) -> Store:
    """Return the part of the job's store under a name, as groups use it."""
    return Part(f"{name}/", job_store())


def control_plane(members: Members) -> Store:
    """Return a client for the records under a name, which its members use and sign; all of them call it.

    Its user gives it back once the control plane has ended, see :mod:`.spare_clients`.
    """
    # A connection of its own, so that a wait on the control plane blocks no other user.
    return signed_together(Part("adaptra", clone(keys_of(members.name))), *members)


def make_groups(members: Members, channels: Iterable[ChannelClass]) -> dict[ChannelClass, ProcessGroup]:
    """Make a communicator of gloo for each of some classes of channels."""
    return {channel: new_group(members.part(channel.name.lower()), "gloo", FOR_EVER) for channel in channels}


def end_waits(group: ProcessGroup) -> None:
    """End all waits for operations of a group: here, and with gloo at its other members too.

    gloo can't cancel a wait, but it closes all connections of a group when one of its waits times out. NCCL ends the operations
    of this member without success. So each member that learns of a loss calls it.
    """
    names = _backends_of(group)
    if names != {"gloo"}:
        group.abort()
    if "gloo" not in names:
        return
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):  # its timeout
                group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, 2**31 - 1).wait(timedelta(milliseconds=1))


def end_waits_of_user(lost: Collection[int]) -> None:
    """End all waits in groups that torch.distributed has a record of, the default one too, and that hold a lost process.

    gloo fails where it waits for the lost one itself. Those that wait for others, which have failed, would do so for ever.
    """
    internals: Any = distributed_c10d
    for group, rank_of in [*internals._world.pg_group_ranks.items()]:
        if distributed.get_rank() in rank_of and not rank_of.keys().isdisjoint(lost):
            with contextlib.suppress(RuntimeError):  # a backend that can't
                end_waits(group)


def broken_peer(group: ProcessGroup, among: Iterable[int] | None = None) -> int | None:
    """Return the lowest member of a group to which gloo's connection is broken, or None.

    gloo refuses to send over a connection that is broken, and doesn't say whose an operation of several members met.

    Args:
        group: Of gloo, alone or beside another backend; None is returned for others.
        among: Those that are looked at; None for all members.
    """
    if "gloo" not in _backends_of(group):
        return None
    for peer in range(group.size()) if among is None else among:
        if peer != group.rank():
            try:
                group.send([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _PROBE_TAG)
            except RuntimeError:
                return peer
    return None


def end_keys(name: str, rank: int, size: int) -> None:
    """Record in the store that a rank no longer needs the keys under a name, which ``size`` ranks use."""
    with contextlib.suppress(DistError, AssertionError):  # a store that is gone has no keys
        job_store().set(f"{_ENDED}/{name}/{rank}", str(size))


def forget(name: str) -> None:
    """Remove all keys under a name, and under the names that begin with it. Nobody may read them any more."""
    with contextlib.suppress(DistError, AssertionError):  # a store that is gone has no keys
        for part in (name, f"{_ENDED}/{name}"):
            _remove_all(PrefixStore(part, job_store()))


def sweep() -> None:
    """Remove the keys of all names that every member has ended. One rank calls it while the store is known to be reachable."""
    store = job_store()
    marks = PrefixStore(_ENDED, store)
    ended: dict[str, list[str]] = defaultdict(list)
    for key in marks.list_keys():
        name, _, rank = key.rpartition("/")
        ended[name].append(rank)
    for name, ranks in ended.items():
        if marks.get(f"{name}/{ranks[0]}") == str(len(ranks)).encode():
            _remove_all(keys_of(name))
            for rank in ranks:
                marks.delete_key(f"{name}/{rank}")


def _remove_all(keys: Store) -> None:
    for key in keys.list_keys():
        keys.delete_key(key)
