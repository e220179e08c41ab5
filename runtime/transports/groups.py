"""The process groups of torch.distributed that transports are built on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from torch import distributed
from torch.distributed import ProcessGroup

from adaptra.errors import LaunchError

# Liveness is the membership's business: a message may be waited for as long as its sender lives.
_FOR_EVER: Final = timedelta(days=7)


def initialise(backend: str) -> bool:
    """Set up the default group from the launcher's environment, unless there is one. True if this call did."""
    if distributed.is_initialized():
        return False
    try:
        distributed.init_process_group(backend)
    except ValueError as error:
        raise LaunchError(f"no process group and no launcher such as torchrun: {error}") from error
    return True


def new_group(members: Sequence[int], backend: str) -> ProcessGroup:
    """A communicator of these ranks only, in this order; each of them makes it."""
    group = distributed.new_group(
        list(members), timeout=_FOR_EVER, backend=backend, use_local_synchronization=True, sort_ranks=False
    )
    assert isinstance(group, ProcessGroup)
    return group
