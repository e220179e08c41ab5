"""The process groups of torch.distributed that transports are built on: made under a name of their own, and ended.

torch names a new group by its ranks and by how many groups the process has. Once a group has been ended the next one would have
the name of one that lives, and read its keys. So every group here is named by who makes it, and no name is used twice.

A group's keys lie in the job's store under its name. Each member writes down there that it has ended the group, without waiting
for an answer, since the store may be gone by then; when the ranks meet again, :func:`sweep` removes what all have ended.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any, Final

from torch import distributed
from torch.distributed import DistError, PrefixStore, ProcessGroup, Store, distributed_c10d

from adaptra.errors import LaunchError
from adaptra.runtime.control_store.forked_children import keep_store_from_children, kept_from_children
from adaptra.runtime.control_store.stores import clone

# Liveness is the membership's business: a message may be waited for as long as its sender lives.
FOR_EVER: Final = timedelta(days=7)

_ENDED: Final = "adaptra ended"


def initialise(backend: str) -> bool:
    """Set up the default group from the launcher's environment, unless there is one. True if this call did."""
    if distributed.is_initialized():
        return False
    try:
        with kept_from_children():
            distributed.init_process_group(backend)
    except ValueError as error:
        raise LaunchError(f"no process group and no launcher such as torchrun: {error}") from error
    return True


def new_group(
    members: Sequence[int], name: str, backend: str | None = None, timeout: timedelta | None = FOR_EVER
) -> ProcessGroup:
    """A communicator of these ranks only, in this order; each of them makes it.

    Args:
        members: Ranks of the job.
        name: The same on all of them, and no other group's of this job.
        backend: torch.distributed's name of it, or None for the job's own.
        timeout: How long its operations wait, or None for the backend's default.
    """
    internals: Any = distributed_c10d  # the public function takes no name
    backend = distributed.Backend(backend or distributed.get_backend())
    with kept_from_children():
        found = internals._new_process_group_helper(
            len(members),
            list(members).index(distributed.get_rank()),
            list(members),
            backend,
            # A connection of its own: the wait for a member holds up all users of the client.
            clone(job_store()),
            name,
            timeout=timeout or internals._get_default_timeout(backend),
        )
    group: ProcessGroup = found[0]
    internals._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    keep_store_from_children(group.get_group_store())
    return group


def job_store() -> Store:
    """The store of the default group."""
    assert distributed.group.WORLD is not None, "the job's ranks have joined"
    return distributed.group.WORLD.get_group_store()


def keys_of(name: str) -> Store:
    """The part of the job's store under a name, as groups have it."""
    return PrefixStore(f"{name}/", job_store())


def next_name(group: ProcessGroup | None) -> str:
    """A name for what the members of a group, or all ranks, make together; they call it as often as each other."""
    parent = group or distributed.group.WORLD
    assert parent is not None, "the job's ranks have joined"
    count = parent.get_group_store().add(f"adaptra parts/{parent.rank()}", 1)
    return f"adaptra/{'job' if group is None else group.group_name}/{count}"


def make_groups(
    ranks: Sequence[int], rank: int, backend: str, name: str
) -> dict[tuple[bool, tuple[int, int] | None], ProcessGroup]:
    """The communicators by direction (is it backward?) and, where each pair has its own, by pair of ranks."""
    pairs: list[tuple[int, int] | None] = [None] if backend == "gloo" else list(combinations(range(len(ranks)), 2))
    groups: dict[tuple[bool, tuple[int, int] | None], ProcessGroup] = {}
    for is_backward in (False, True):
        for pair in pairs:
            if pair is None or rank in pair:
                members = list(ranks) if pair is None else [ranks[member] for member in pair]
                which = f"{name}/{'backward' if is_backward else 'forward'}/{pair or 'all'}"
                groups[is_backward, pair] = new_group(members, which, backend)
    return groups


def end_group(group: ProcessGroup) -> None:
    """Give back a group's descriptors, threads and memory. Each member calls it, once it uses the group no more."""
    name, size, rank = group.group_name, group.size(), group.rank()
    with contextlib.suppress(ValueError):  # which the program has ended itself, with all groups
        distributed.destroy_process_group(group)
        end_keys(name, rank, size)


def end_keys(name: str, rank: int, size: int) -> None:
    """Write down that a rank needs the keys under a name no more, of so many ranks that use them."""
    with contextlib.suppress(DistError, AssertionError):  # a store that is gone has no keys
        job_store().set(f"{_ENDED}/{name}/{rank}", str(size))


def sweep() -> None:
    """Remove the keys of all that every member has ended. One rank calls it, when it knows the store to be there."""
    store = job_store()
    told = PrefixStore(_ENDED, store)
    ended: dict[str, list[str]] = defaultdict(list)
    for key in told.list_keys():
        name, _, rank = key.rpartition("/")
        ended[name].append(rank)
    for name, ranks in ended.items():
        if told.get(f"{name}/{ranks[0]}") == str(len(ranks)).encode():
            keys = keys_of(name)
            for key in keys.list_keys():
                keys.delete_key(key)
            for rank in ranks:
                told.delete_key(f"{name}/{rank}")
