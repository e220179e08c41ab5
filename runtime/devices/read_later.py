"""Values on their way between a device and the host, which does not wait for them, or as late as it can."""

from __future__ import annotations

import torch
from torch import Tensor

from adaptra.runtime.devices.events import recorded


class ReadLater:
    """A tensor's values, on their way to the host.

    Args:
        tensor: On any device; it may change once the work that is queued now is done.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._values = tensor
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._copied = recorded(torch.cuda.current_stream(tensor.device))

    @property
    def is_there(self) -> bool:
        """Whether the values have arrived."""
        return self._copied is None or self._copied.query()

    def wait(self) -> Tensor:
        """Return the values on the host, once they have arrived."""
        if self._copied is not None and not self.is_there:
            self._copied.synchronize()
        return self._values


def moved_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor on a device. The host waits only for values that it is to have itself."""
    if tensor.is_cuda and device.type == "cpu":
        return ReadLater(tensor).wait()
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
