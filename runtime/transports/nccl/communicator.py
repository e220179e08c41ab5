"""A communicator of NCCL with two members, which carries the messages of one directed edge.

torch.distributed has no record of it. torch's backend is used directly, and torch 2.13 and 2.15 have different ones, which are
told apart by what they have. The newer one is bound to its device, and says whether an operation succeeded. The older one is
bound when it connects, and an operation has an error or none.

Its kernels take one block of threads of the GPU each. A receive that is posted ahead occupies that until its message comes, and
the communicators of a rank must fit onto the GPU together.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import Store, Work, distributed_c10d

from adaptra.errors import TransportError
from adaptra.runtime.transports.process_groups import FOR_EVER, Members

BLOCKS: Final = 1
"""The blocks of threads of an operation's kernel, which are NCCL's channels."""

_TAG: Final = 0
_WATCHED: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Environment variables by which torch's watchdog leaves failed operations to their user, instead of killing the process. The
membership names a lost rank, and this transport aborts its communicators then."""

_environment = threading.Lock()


class Communicator:
    """Two ranks' communicator. Each of the two makes its own; neither waits for the other until :meth:`connect`.

    Args:
        members: This rank as one of two.
        store: The members' keys, which nothing else uses.
        device: The GPU of this rank.
    """

    def __init__(self, members: Members, store: Store, device: torch.device) -> None:
        self._peer: Final = 1 - members.rank
        self._device: Final = device
        internals: Any = distributed_c10d
        options = internals.ProcessGroupNCCL.Options()
        options._timeout, options.group_name = FOR_EVER, members.name
        options.is_high_priority_stream = True
        config = getattr(options, "config", None)  # missing where NCCL is too old for it
        if config is not None:
            config.min_ctas = config.max_ctas = BLOCKS
        newer = getattr(internals, "ProcessGroupNCCL2", None)
        with _set(_WATCHED):
            if newer is not None:
                self._backend: Any = newer(store, members.rank, members.size, options, device)
            else:
                if config is not None:
                    config.blocking = 0  # so that an abort ends its creation too
                self._backend = internals.ProcessGroupNCCL(store, members.rank, members.size, options)

    def connect(self) -> None:
        """Connect to the other member; waits for it.

        Raises:
            RuntimeError: NCCL refuses.
        """
        # Else the older backend makes another communicator at the first message.
        self._backend.eager_connect_single_device(self._device)

    def send(self, memory: Tensor) -> Work:
        """Send memory of the device to the other member, behind what the current stream has to do."""
        return self._backend.send([memory], self._peer, _TAG)

    def receive(self, memory: Tensor) -> Work:
        """Receive into memory of the device, behind what the current stream has to do."""
        return self._backend.recv([memory], self._peer, _TAG)

    def abort(self) -> None:
        """End all operations without success, and the communicator. May block."""
        self._backend.abort()

    def shutdown(self) -> None:
        """End the communicator once its operations have ended. May block."""
        self._backend.shutdown()


def failure_of(work: Work) -> Exception | None:
    """Return why an operation that has ended did not succeed; None if it did.

    An operation that was aborted ends as well, and what it was to write is no message.
    """
    work.is_completed()  # the older backend looks for errors of its communicator here
    try:
        if work.is_success():
            return None
        is_told = True
    except NotImplementedError:  # the older backend
        is_told = False
    try:
        error = work.exception()
    except Exception as raised:  # a binding may raise the error where another returns it
        error = raised
    if error is None and is_told:
        return TransportError("NCCL ended the operation without success")
    return error


@contextlib.contextmanager
def _set(variables: Mapping[str, str]) -> Generator[None]:
    """Set environment variables for a while, which torch reads when it makes a backend."""
    with _environment:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
