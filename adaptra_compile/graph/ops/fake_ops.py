"""Fake versions of ops that torch can run but can't run on fake tensors."""

# pyright: reportPrivateUsage=false
# Torch's own table of how ops run on fake tensors has no public name.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode


def _grouped_mm(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the op on fake tensors. Torch does so only for bfloat16 on an accelerator, but a CPU runs other dtypes too."""
    one, other, groups, bias, dtype = _bound(*args, **kwargs)
    if one.device.type != "cpu" or bias is not None or groups is None:
        return NotImplemented
    dtype = dtype or one.dtype
    rows, columns = one.shape[-2], other.shape[-1]
    # The kernel begins every row at a multiple of 16 bytes.
    one_row = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    with mode:
        if one.dim() == other.dim():
            return torch.empty_strided(
                (groups.shape[0], rows, columns), (rows * one_row, one_row, 1), dtype=dtype, device=one.device
            )
        return torch.empty_strided((rows, columns), (one_row, 1), dtype=dtype, device=one.device)


def _bound(
    one: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, torch.dtype | None]:
    return one, other, offs, bias, out_dtype


def describe_more_ops() -> None:
    """Register these ops for fake tensors, in the whole process."""
    op_implementations_dict.setdefault(torch.ops.aten._grouped_mm.default, _grouped_mm)
