"""The memory layout of a tensor: the bytes that travel to another rank, and the same layout there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from adaptra.graph.ops.specs import dtype_name

MOVABLE: Final = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.complex128, torch.complex64, torch.complex32),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    )
}
"""The dtypes whose elements are whole bytes that mean the same on every rank, by name."""


def why_not_movable(tensor: Tensor) -> str | None:
    """Return the reason why a tensor can't be rebuilt from its bytes on another rank, or None if it can."""
    if tensor.layout is not torch.strided:
        return f"its layout is {str(tensor.layout).removeprefix('torch.')}"
    if dtype_name(tensor.dtype) not in MOVABLE:
        return f"its dtype is {dtype_name(tensor.dtype)}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"it is on device {tensor.device.type}"
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"it is a {type(tensor).__name__}"
    if _overlaps(tensor.shape, tensor.stride()):
        return f"several of its elements lie in one place: strides {list(tensor.stride())} of shape {list(tensor.shape)}"
    return None


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements in the order of its indices. Repeated elements (stride 0) are included once."""
    plain = _once(tensor.detach()).resolve_conj().resolve_neg().cpu()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def byte_count(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Return the number of bytes that :func:`bytes_of` gives for a tensor of this form."""
    return math.prod(_sizes_once(shape, stride)) * dtype.itemsize


def from_bytes(body: Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Make a tensor of this form on a device, with the elements that :func:`bytes_of` gave."""
    sizes = _sizes_once(shape, stride)
    plain = body.clone().view(dtype).reshape(sizes)  # of its own, as the bytes may begin anywhere
    return torch.empty_strided(sizes, stride, dtype=dtype, device=device).copy_(plain).as_strided(shape, stride)


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor, with the same memory layout."""
    once = _once(tensor.detach())
    return torch.empty_strided(
        once.shape, once.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(once).as_strided(tensor.shape, tensor.stride())  # fmt: skip


def _sizes_once(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    return [min(size, 1) if step == 0 else size for size, step in zip(shape, stride, strict=True)]


def _once(tensor: Tensor) -> Tensor:
    for dimension, step in enumerate(tensor.stride()):
        if step == 0:
            tensor = tensor.narrow(dimension, 0, min(tensor.shape[dimension], 1))
    return tensor


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if elements overlap, other than repeated ones. Some unusual interleavings also return True."""
    reach = 0
    for step, size in sorted(zip(stride, _sizes_once(shape, stride), strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False
