"""torch's two backends for NCCL as an edge between two ranks meets them: what they are made with, and what their works tell.

The older one, of torch 2.13, makes a communicator for a pair of ranks at its first message unless it was connected before. With
``config.blocking`` 0 connecting returns at once, and the first operation waits. Its works tell an error or none. The newer one,
of torch 2.15, is given its device, and its works tell whether they succeeded.
"""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch.distributed import Store

from fake_cuda.nccl import NcclWork, ProcessGroupNCCL, _Communicator

_WATCHDOG: Final = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


class EdgeOptions:
    """See torch's ``ProcessGroupNCCL.Options``."""

    is_high_priority_stream = False

    def __init__(self) -> None:
        self.config = SimpleNamespace(blocking=None, min_ctas=None, max_ctas=None)


class _TellsErrors:
    """A work of the older backend."""

    def __init__(self, work: NcclWork) -> None:
        self.wait, self.is_completed, self.exception = work.wait, work.is_completed, work.exception

    def is_success(self) -> bool:
        """Refuse to tell.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")


class Older(ProcessGroupNCCL):
    """The backend of torch 2.13.

    Attributes:
        made: All that were made, with their options and the watchdog's environment variables of that moment.
    """

    Options = EdgeOptions  # pyright: ignore[reportAssignmentType]  # the base class has fewer
    made: Final[list[tuple[Any, tuple[str | None, ...]]]] = []

    def __init__(self, store: Store, rank: int, size: int, options: Any = None) -> None:
        super().__init__(store, rank, size, options)
        Older.made.append((options, tuple(map(os.environ.get, _WATCHDOG))))
        self._blocks = options.config.blocking != 0
        self._connecting: threading.Thread | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Make the group's communicator, for messages too."""
        self._connecting = threading.Thread(target=super()._communicator, args=("all", self.rank(), self.size(), device.index))
        self._connecting.start()
        if self._blocks:
            self._connecting.join()

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:  # noqa: N803
        """See the base class."""
        return _TellsErrors(super().send(tensors, dstRank, tag))

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:  # noqa: N803
        """See the base class."""
        return _TellsErrors(super().recv(tensors, srcRank, tag))

    def _pair(self, peer: int, tensor: Tensor) -> tuple[_Communicator, int]:
        if self._connecting is None:
            return super()._pair(peer, tensor)
        self._connecting.join()
        return self._all(tensor.device.index), peer


class Newer(ProcessGroupNCCL):
    """The backend of torch 2.15."""

    def __init__(self, store: Store, rank: int, size: int, options: Any, device: torch.device | None = None) -> None:
        super().__init__(store, rank, size, options)
        Older.made.append((options, tuple(map(os.environ.get, _WATCHDOG))))
        assert device is not None, "torch takes the device of the rank's number where none is given"
        self._device = device

    def _pair(self, peer: int, tensor: Tensor) -> tuple[_Communicator, int]:
        assert tensor.device == self._device
        return self._all(tensor.device.index), peer


def use(name: str) -> None:
    """Have torch be one with the ``older`` backend alone, or one that has the ``newer`` as well."""
    c10d: Any = distributed.distributed_c10d
    c10d.ProcessGroupNCCL = Older
    c10d.ProcessGroupNCCL2 = Newer
    if name == "older":
        del c10d.ProcessGroupNCCL2
