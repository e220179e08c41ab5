"""Layout of tensors that travel between stages, so that the receiver can restore the sender's strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptra.graph.ops.specs import TensorSpec


@dataclass(frozen=True, slots=True)
class Gap:
    """The numbers of elements of the enclosing dense tensor before and after its part, in one dimension."""

    before: int = 0
    after: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a tensor in a message: contiguous, its dimensions ordered by stride. The receiver can restore its strides.

    Kernels may round differently for other strides, so a stage must see those that one process would see.

    Attributes:
        order: The tensor's dimensions in the order of the message's.
        gaps: The gap of each of the message's dimensions. If elements are not adjacent, the gap of an added last dimension of
            size 1 follows. Empty for a dense tensor.
    """

    order: tuple[int, ...]
    gaps: tuple[Gap, ...] = ()

    @staticmethod
    def with_gaps(tensor: Tensor) -> Layout:
        """Return the layout that also keeps the gaps between elements of a tensor that is part of a dense one."""
        order = Layout.of(tensor).order
        shape, strides = ([one[dimension] for dimension in order] for one in (tensor.shape, tensor.stride()))
        return Layout(order, _gaps(shape, strides, int(tensor.storage_offset())))

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        """Return the layout that keeps a tensor's strides if it is dense. Gaps are not kept."""
        dimensions = range(tensor.dim())
        if tensor.is_contiguous():
            return Layout(tuple(dimensions))
        return Layout(tuple(sorted(dimensions, key=lambda dimension: (-tensor.stride(dimension), dimension))))

    def pack(self, tensor: Tensor) -> Tensor:
        """Return the tensor as it is sent."""
        return self._permute(tensor, self.order).contiguous()

    def unpack(self, message: Tensor) -> Tensor:
        """Return the tensor as the sender had it."""
        if self.gaps:
            message = self._spread(message)
        return self._permute(message, tuple(self.order.index(dimension) for dimension in range(len(self.order))))

    def spec(self, tensor: Tensor, requires_grad: bool) -> TensorSpec:
        """Return the spec of a tensor's message."""
        return TensorSpec(tuple(tensor.shape[dimension] for dimension in self.order), tensor.dtype, requires_grad)

    def _spread(self, message: Tensor) -> Tensor:
        shape = message.shape
        spread = message.unsqueeze(-1) if len(self.gaps) > len(shape) else message
        padding = [side for gap in reversed(self.gaps) for side in (gap.before, gap.after)]
        spread = torch.constant_pad_nd(spread, padding)
        for dimension, size in enumerate(shape):
            gap = self.gaps[dimension]
            if gap.before or gap.after:
                spread = spread.narrow(dimension, gap.before, size)
        return spread.select(-1, self.gaps[-1].before) if len(self.gaps) > len(shape) else spread

    @staticmethod
    def _permute(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
        return tensor if order == tuple(range(len(order))) else tensor.permute(order)


def _gaps(shape: Sequence[int], strides: Sequence[int], offset: int) -> tuple[Gap, ...]:
    """Return the gaps of a part of a dense tensor, whose dimensions begin with the longest stride.

    The result is empty for a dense tensor, and for one that is no such part.
    """
    enclosing = [*shape, 1]
    inner, step = len(shape), 1  # the next dimension further in, and its stride
    for dimension in reversed(range(len(shape))):
        if shape[dimension] == 1:
            continue
        enclosing[inner], rest = divmod(strides[dimension], step)
        if rest or enclosing[inner] < (1 if inner == len(shape) else shape[inner]):
            return ()
        inner, step = dimension, strides[dimension]
    sizes = [*shape, 1]
    last = next((index for index in reversed(range(len(sizes))) if enclosing[index] > sizes[index]), None)
    if last is None or 0 in shape:
        return ()
    # The beginning of the innermost part decides its alignment, on which kernels may depend as well.
    before = min(offset % enclosing[last], enclosing[last] - sizes[last])
    gaps = [Gap(0, whole - size) for whole, size in zip(enclosing, sizes, strict=True)]
    gaps[last] = Gap(before, gaps[last].after - before)
    return tuple(gaps if enclosing[-1] > 1 else gaps[:-1])
