"""The process groups of torch.distributed that transports are built on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations
from typing import Final

from torch import distributed
from torch.distributed import ProcessGroup

from adaptra.errors import LaunchError
from adaptra.runtime.forked import keep_store_from_children, kept_from_children

# Liveness is the membership's business: a message may be waited for as long as its sender lives.
FOR_EVER: Final = timedelta(days=7)


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


def new_group(members: Sequence[int], backend: str | None = None, timeout: timedelta | None = FOR_EVER) -> ProcessGroup:
    """A communicator of these ranks only, in this order; each of them makes it.

    Args:
        members: Ranks of the job.
        backend: torch.distributed's name of it, or None for the job's own.
        timeout: How long its operations wait, or None for the backend's default.
    """
    with kept_from_children():
        group = distributed.new_group(
            list(members), timeout=timeout, backend=backend, use_local_synchronization=True, sort_ranks=False
        )
    assert isinstance(group, ProcessGroup)
    keep_store_from_children(group.get_group_store())
    return group


def make_groups(ranks: Sequence[int], rank: int, backend: str) -> dict[tuple[bool, tuple[int, int] | None], ProcessGroup]:
    """The communicators by direction (is it backward?) and, where each pair has its own, by pair of ranks."""
    pairs: list[tuple[int, int] | None] = [None] if backend == "gloo" else list(combinations(range(len(ranks)), 2))
    groups: dict[tuple[bool, tuple[int, int] | None], ProcessGroup] = {}
    for is_backward in (False, True):
        for pair in pairs:
            if pair is None or rank in pair:
                members = list(ranks) if pair is None else [ranks[member] for member in pair]
                groups[is_backward, pair] = new_group(members, backend)
    return groups
