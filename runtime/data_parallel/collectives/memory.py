"""Memory of messages that is used again, because touching new memory costs as much as adding to it."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class SpareMemory:
    """Tensors whose memory returns for later ones. It keeps as much as was in use at once."""

    def __init__(self) -> None:
        self._spare: defaultdict[tuple[int, torch.device], list[Tensor]] = defaultdict(list)
        self._taken: dict[int, Tensor] = {}

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of ``count`` elements, (count,), of any values."""
        used = count * dtype.itemsize
        size = 1 << max(0, used - 1).bit_length()
        spare = self._spare[size, device]
        memory = spare.pop() if spare else torch.empty(size, dtype=torch.uint8, device=device)
        self._taken[memory.data_ptr()] = memory
        return memory[:used].view(dtype)

    def give_back(self, tensor: Tensor) -> None:
        """Take back a tensor of :meth:`take`, which nobody uses any more. Other tensors stay as they are."""
        memory = self._taken.pop(tensor.data_ptr(), None)
        if memory is not None:
            self._spare[memory.numel(), memory.device].append(memory)
