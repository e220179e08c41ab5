"""Fake versions of ops that torch can't run on fake tensors, or whose results have other strides there.

An op takes another way by its inputs' strides: ``linear`` copies what has gaps, and messages travel in the sender's layout.
"""

# pyright: reportPrivateUsage=false
# Torch's own table of how ops run on fake tensors has no public name.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch._decomp import decomposition_table, meta_table
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

Strides = tuple[int, ...]


def _grouped_mm(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the op on fake tensors. Torch does so only for bfloat16 on an accelerator, but a CPU runs other dtypes too."""
    matrix, other, groups, bias, dtype = _bound(*args, **kwargs)
    if matrix.device.type != "cpu" or bias is not None or groups is None:
        return NotImplemented
    dtype = dtype or matrix.dtype
    rows, columns = matrix.shape[-2], other.shape[-1]
    # The kernel begins every row at a multiple of 16 bytes.
    one_row = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    with mode:
        if matrix.dim() == other.dim():
            return torch.empty_strided(
                (groups.shape[0], rows, columns), (rows * one_row, one_row, 1), dtype=dtype, device=matrix.device
            )
        return torch.empty_strided((rows, columns), (one_row, 1), dtype=dtype, device=matrix.device)


def _bound(
    matrix: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, torch.dtype | None]:
    return matrix, other, offs, bias, out_dtype


def _dense_format(tensor: Tensor) -> Strides:
    """A memory format in which a tensor is dense, else contiguous."""
    wanted = suggest_memory_format(tensor)
    return _in_format(tensor, wanted if tensor.is_contiguous(memory_format=wanted) else torch.contiguous_format)


def _suggested_format(one: Tensor) -> Strides:
    """The memory format that a tensor's strides suggest."""
    return _in_format(one, suggest_memory_format(one))


def _contiguous(one: Tensor) -> Strides:
    return _in_format(one, torch.contiguous_format)


def _elementwise(*args: Any) -> Strides:
    """What an iteration over the elements of all tensors gives: the first one's strides, if it is dense."""
    tensors = [one for one in args if isinstance(one, Tensor)]
    most = max(one.numel() for one in tensors)
    return tuple(compute_elementwise_output_strides(*(one for one in tensors if one.numel() == most)))


def _in_format(one: Tensor, wanted: torch.memory_format) -> Strides:
    return torch.empty(one.shape, device="meta").contiguous(memory_format=wanted).stride()


def _laid_out(rule: Callable[..., Strides], of: slice, mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op as torch does on contiguous tensors, and give its first result the strides that the CPU's kernel gives it."""
    tensors = [one for one in args if isinstance(one, Tensor)]
    is_as_torch_says = tensors[0].device.type != "cpu" or any(map(_is_symbolic, tensors))
    is_as_torch_says = is_as_torch_says or all(one.is_contiguous() for one in tensors)
    decomposed = decomposition_table.get(func)
    if is_as_torch_says and decomposed is None:
        return NotImplemented
    with mode:
        results = (decomposed or func)(*(args if is_as_torch_says else map(_dense, args)), **kwargs)
        if is_as_torch_says:
            return results
        first, others = (results, None) if isinstance(results, Tensor) else (results[0], results[1:])
        if first is not None and first.numel() == max(one.numel() for one in tensors):  # a reduced loss is a scalar
            first = torch.empty_strided(first.shape, rule(*args[of]), dtype=first.dtype, device=first.device)
        return first if others is None else (first, *others)


def _is_symbolic(one: Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in one.shape)


def _dense(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device=value.device) if isinstance(value, Tensor) else value


def _roll(mode: FakeTensorMode, _: Any, tensor: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Join two parts in each dimension, as the CPU's kernel does: the result has the layout of that."""
    if tensor.device.type != "cpu" or _is_symbolic(tensor) or tensor.is_contiguous() or not dims or tensor.numel() == 0:
        return NotImplemented
    with mode:
        for shift, dimension in zip(shifts, dims, strict=True):
            begin = -shift % tensor.shape[dimension]
            tensor = torch.cat(
                [tensor.narrow(dimension, begin, tensor.shape[dimension] - begin), tensor.narrow(dimension, 0, begin)],
                dimension,
            )
        return tensor


_aten = torch.ops.aten
_FIRST, _SECOND, _ALL = slice(0, 1), slice(1, 2), slice(None)
_LAID_OUT: Final[Mapping[Any, tuple[Callable[..., Strides], slice]]] = {
    _aten.native_batch_norm.default: (_dense_format, _FIRST),
    _aten.native_batch_norm_backward.default: (_suggested_format, _SECOND),
    _aten.native_layer_norm_backward.default: (_contiguous, _SECOND),
    _aten.channel_shuffle.default: (_suggested_format, _FIRST),
    _aten.mse_loss_backward.default: (_contiguous, _SECOND),
    _aten.smooth_l1_loss_backward.default: (_contiguous, _SECOND),
    _aten.huber_loss_backward.default: (_contiguous, _SECOND),
    _aten.glu_backward.default: (_contiguous, _SECOND),
    _aten.log_sigmoid_forward.default: (_contiguous, _FIRST),
    _aten.log_sigmoid_backward.default: (_elementwise, _ALL),
    _aten.softplus_backward.default: (_elementwise, _ALL),
    _aten.hardswish_backward.default: (_elementwise, _ALL),
    _aten.hardsigmoid_backward.default: (_elementwise, _ALL),
    _aten.hardtanh_backward.default: (_elementwise, _ALL),
    _aten.elu_backward.default: (_elementwise, _ALL),
    _aten.binary_cross_entropy.default: (_elementwise, _FIRST),
    _aten.binary_cross_entropy_backward.default: (_elementwise, _SECOND),
}
"""The first result's strides by the CPU's kernels, where torch's fake version has others: a rule, and its arguments."""


def describe_more_ops() -> None:
    """Register these ops for fake tensors, in the whole process."""
    fakes = {op: partial(_laid_out, rule, of) for op, (rule, of) in _LAID_OUT.items()}
    for op, fake in {_aten._grouped_mm.default: _grouped_mm, _aten.roll.default: _roll, **fakes}.items():
        op_implementations_dict.setdefault(op, fake)
        if op in decomposition_table:  # torch decomposes it before it looks for a fake version, unless it has a meta function
            meta_table.setdefault(op, decomposition_table[op])
