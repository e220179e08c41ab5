"""The strides of batches that other replicas compute: they travel beside the tensors, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.runtime.devices.read_later import moved_to

ALIGNED_BYTES: Final = 64
"""No kernel asks whether a tensor begins at a multiple of more bytes."""


class StrideNumbers:
    """The strides of a batch's tensors, as numbers beside them in a message, and how far they begin from an aligned place.

    A user gives batches of any strides, which no rank knows beforehand. Kernels may round differently for others.

    Args:
        specs: The tensors.

    Attributes:
        specs: The tensors of the message: those given, and the numbers if there are any.
    """

    def __init__(self, specs: MessageSpec) -> None:
        self._dimensions = [len(spec.shape) for spec in specs]
        count = sum(self._dimensions) + len(specs)
        self.specs: Final[MessageSpec] = (*specs, TensorSpec((count,), torch.int64, stays_on_host=True)) if specs else ()

    def beside(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return tensors as they are sent."""
        if not self.specs:
            return ()
        numbers = [number for tensor in tensors for number in (*tensor.stride(), _from_aligned(tensor))]
        # On one device, as kernels pack what lies together.
        return (*tensors, moved_to(tensors[0].device, torch.tensor(numbers, dtype=torch.int64)))

    def restore(self, sent: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors of a message as the sender had them. Those that arrive otherwise are copied."""
        if not self.specs:
            return ()
        *tensors, numbers = sent
        left = iter(numbers.tolist())
        strides = [(tuple(next(left) for _ in range(count)), next(left)) for count in self._dimensions]
        return tuple(_laid_out(tensor, *one) for tensor, one in zip(tensors, strides, strict=True))


def _from_aligned(tensor: Tensor) -> int:
    return tensor.data_ptr() % ALIGNED_BYTES


def _laid_out(tensor: Tensor, strides: tuple[int, ...], behind: int) -> Tensor:
    """Return a tensor with these strides, so many bytes behind an aligned place.

    Elements that are repeated have a stride of 0, and one place.
    """
    if tensor.stride() == strides and (_from_aligned(tensor) == behind or not tensor.numel()):
        return tensor
    once = [min(size, 1) if stride == 0 else size for size, stride in zip(tensor.shape, strides, strict=True)]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(once, strides, strict=True)) if tensor.numel() else 0
    memory = tensor.new_empty(extent + ALIGNED_BYTES // tensor.itemsize)
    offset = (behind - _from_aligned(memory)) % ALIGNED_BYTES // tensor.itemsize
    memory.as_strided(once, strides, offset).copy_(tensor[tuple(slice(size) for size in once)])
    return memory.as_strided(tensor.shape, strides, offset)
