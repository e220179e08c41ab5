"""What a tensor that crosses a stage boundary looks like, without the tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor, and whether a gradient flows back through it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def bytes(self) -> int:
        """The size of the tensor's elements, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


MessageSpec = tuple[TensorSpec, ...]
"""The tensors of one message, in order."""
