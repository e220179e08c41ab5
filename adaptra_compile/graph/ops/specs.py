"""Specs of the tensors that cross a stage boundary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements. Torch's ``nbytes`` refuses sparse tensors."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor, whether it has a gradient, and how it is sent.

    With ``lossy_bf16`` a float32 tensor is sent as bfloat16, and the receiver widens it again. That halves the bytes but rounds
    the numbers. With ``stays_on_host`` the receiver's host reads it: it arrives in host memory on every transport.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    lossy_bf16: bool = False
    stays_on_host: bool = False

    @property
    def elements(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size of the tensor's elements, in bytes."""
        return self.elements * self.dtype.itemsize

    @property
    def travels_as(self) -> torch.dtype:
        """The dtype of the tensor's elements while it travels."""
        return torch.bfloat16 if self.lossy_bf16 else self.dtype

    @property
    def travelling_bytes(self) -> int:
        """The size of the tensor's elements while it travels, in bytes."""
        return math.prod(self.shape) * self.travels_as.itemsize

    def arriving(self, tensor: Tensor) -> Tensor:
        """Return the tensor as it arrives: unchanged, or rounded to nearest, ties to even."""
        return tensor.to(self.travels_as).to(self.dtype)


MessageSpec = tuple[TensorSpec, ...]
"""The tensors of one message, in order."""
