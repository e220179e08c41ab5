"""The form of a tensor outside a step: what ranks tell each other of it, its bytes, and the same form on another rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from adaptra.checks import is_whole
from adaptra.graph.ops.specs import dtype_name
from adaptra.json_files import Fields

MOVABLE: Final = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.complex128, torch.complex64, torch.complex32),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
        torch.float4_e2m1fn_x2,
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


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a rank tells another one of a tensor before its bytes. Its elements travel in the order in which they lie.

    Elements that are repeated, with a stride of 0, travel once.

    Attributes:
        device: The type of its device, ``cpu`` or ``cuda``.
        dtype: Its dtype, one of :data:`MOVABLE`.
        shape, stride: Its sizes and strides.
    """

    device: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> TensorForm:
        """Return the form of a tensor, with gaps between its elements and their repetition."""
        return TensorForm(tensor.device.type, tensor.dtype, tuple(tensor.shape), tensor.stride())

    @staticmethod
    def dense(tensor: Tensor) -> TensorForm:
        """Return the form on the CPU without gaps and repetition, in which dimensions have the same order in memory."""
        form, step = TensorForm.of(tensor), 1
        stride = list(form.stride)
        for dimension in reversed(range(tensor.dim()) if tensor.is_contiguous() else form._order):
            stride[dimension] = step
            step *= max(form.shape[dimension], 1)
        return replace(form, device="cpu", stride=tuple(stride))

    @staticmethod
    def read(fields: Fields, name: str, item: object) -> TensorForm:
        """Return the form that :meth:`told` gave to another rank.

        Args:
            fields: The object that has it, which begins the error.
            name: The field of the object.
            item: What is told.

        Raises:
            ControlError: It is no form.
        """
        match item:
            case [("cpu" | "cuda") as device, str(dtype), [*sizes], [*steps]] if dtype in MOVABLE and len(sizes) == len(steps):
                if all(is_whole(one) and one >= 0 for one in (*sizes, *steps)):
                    shape, stride = (tuple(int(str(one)) for one in some) for some in (sizes, steps))
                    if not _overlaps(shape, stride):
                        return TensorForm(device, MOVABLE[dtype], shape, stride)
            case _:
                pass
        raise fields.refuse(name, "a device, a dtype, a shape and its strides", item)

    def told(self) -> list[object]:
        """Return the form as JSON."""
        return [self.device, dtype_name(self.dtype), list(self.shape), list(self.stride)]

    @property
    def nbytes(self) -> int:
        """The number of bytes that travel."""
        return math.prod(self._once) * self.dtype.itemsize

    def pack(self, tensor: Tensor) -> Tensor:
        """Return the bytes of a tensor of this form, on the CPU. They may be its own memory."""
        plain = _narrowed(tensor.detach().resolve_conj().resolve_neg(), self._once)
        return plain.permute(self._order).cpu().contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)

    def unpack(self, body: Tensor) -> Tensor:
        """Return the tensor whose bytes are ``body``, which :meth:`pack` gave, and which may become its memory.

        They begin where elements of any dtype may.
        """
        order = self._order
        lying = body.view(self.dtype).reshape([self._once[dimension] for dimension in order])
        plain = lying.permute([order.index(dimension) for dimension in range(len(order))]).to(self.device)
        if plain.shape == self.shape and plain.stride() == self.stride:
            return plain
        return _laid_out(plain, self.shape, self.stride)

    @property
    def _once(self) -> list[int]:
        return _sizes_once(self.shape, self.stride)

    @property
    def _order(self) -> list[int]:
        """The dimensions, that of the longest stride first."""
        return sorted(range(len(self.shape)), key=lambda dimension: (-self.stride[dimension], dimension))


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor, with the same memory layout."""
    plain = _narrowed(tensor.detach(), _sizes_once(tensor.shape, tensor.stride()))
    return _laid_out(plain, tensor.shape, tensor.stride())


def _sizes_once(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    return [min(size, 1) if step == 0 else size for size, step in zip(shape, stride, strict=True)]


def _narrowed(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the first elements of each dimension."""
    for dimension, size in enumerate(sizes):
        tensor = tensor.narrow(dimension, 0, size)
    return tensor


def _laid_out(plain: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a copy of elements that are there once each, of this shape and with these strides."""
    memory = torch.empty_strided(plain.shape, stride, dtype=plain.dtype, device=plain.device)
    return memory.copy_(plain).as_strided(shape, stride)


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if elements overlap, other than repeated ones. Some unusual interleavings also return True."""
    reach = 0
    for step, size in sorted(zip(stride, _sizes_once(shape, stride), strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False
