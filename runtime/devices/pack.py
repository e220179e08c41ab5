"""Packing of a message's tensors, contiguous or not, into one flat buffer on their own device, by a kernel in Triton.

The layout is that of :mod:`adaptra.runtime.transports.message_format`. Every tensor begins at a multiple of ``ALIGNMENT``
bytes, its elements lie in the order of its dimensions, and the bytes between tensors are zero. So one copy to the host follows
instead of one per tensor, and it is not strided. Without Triton, torch copies tensor by tensor.

A tensor whose spec says ``lossy_bf16`` is rounded on the way into the buffer, to nearest, ties to even.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from adaptra.errors import MissingExtraError
from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.runtime.devices import triton_trial
from adaptra.runtime.transports.message_format import ALIGNMENT, flat_bytes, views_of

_BLOCK: Final = 1024
_DIMENSIONS: Final = 4
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def why_not(device: torch.device) -> str | None:
    """Return the reason why tensors on ``device`` can't be packed by the kernel, or None after packing a small one
    successfully.
    """

    def packs_rightly() -> bool:
        sample = torch.arange(6, dtype=torch.int32, device=device).view(2, 3).t()
        flat = torch.empty(ALIGNMENT, dtype=torch.uint8, device=device)
        specs = (TensorSpec((3, 2), torch.int32),)
        pack(flat, [sample], specs)
        (view,) = views_of(flat, specs)
        return torch.equal(view, sample)

    return triton_trial.why_not(packs_rightly)


def is_worthwhile(tensors: Sequence[Tensor], specs: MessageSpec, device: torch.device) -> bool:
    """Return True if tensors can be packed on ``device``, and packing saves time.

    A single contiguous tensor that is not rounded is flat already.
    """
    return all(tensor.device == device for tensor in tensors) and (
        len(tensors) > 1
        or any(spec.lossy_bf16 or not tensor.is_contiguous() for tensor, spec in zip(tensors, specs, strict=True))
    )


def pack(flat: Tensor, tensors: Sequence[Tensor], specs: MessageSpec) -> None:
    """Write a message into ``flat`` on the current stream, every byte of it.

    Args:
        flat: (at least :func:`flat_bytes` of the specs,) uint8, contiguous, on the tensors' device.
        tensors: Tensors of any dtype, shape and stride, none of them sparse.
        specs: One per tensor.

    Raises:
        MissingExtraError: Triton is not installed.
    """
    assert flat.dtype == torch.uint8 and flat.is_contiguous() and flat.numel() >= flat_bytes(specs), "room for the message"
    kernel = _kernel()
    offset = 0
    for tensor, spec in zip(tensors, specs, strict=True):
        assert tensor.device == flat.device, "packed where the tensors lie"
        end = offset + flat_bytes((spec,))
        if end > offset:
            _launch(kernel, tensor.detach(), flat[offset:end], is_narrowed=spec.lossy_bf16)
        offset = end


def _launch(kernel: Any, tensor: Tensor, target: Tensor, *, is_narrowed: bool) -> None:
    source = _as_integers(tensor)
    dimensions = _joined(source)
    if len(dimensions) > _DIMENSIONS:
        source = source.contiguous()
        dimensions = _joined(source)
    dimensions += [(1, 0)] * (_DIMENSIONS - len(dimensions))
    flat = target.view(torch.int16 if is_narrowed else source.dtype)
    padded = flat.numel()
    reach = sum((size - 1) * stride for size, stride in dimensions)
    blocks = -(-padded // _BLOCK)
    sizes, strides = [size for size, _ in dimensions], [stride for _, stride in dimensions]
    kernel[(blocks,)](
        source,
        flat,
        source.numel(),
        padded,
        *sizes[1:],
        *strides,
        # Offsets past the end may exceed 32 bits as well, though nothing is read there.
        WIDE=max(reach, blocks * _BLOCK) > torch.iinfo(torch.int32).max,
        NARROW=is_narrowed,
        BLOCK=_BLOCK,
    )


def _as_integers(tensor: Tensor) -> Tensor:
    """Return the same bits as integers, (shape, or shape and 2 if complex), without a copy unless a conjugation is pending."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def _joined(tensor: Tensor) -> list[tuple[int, int]]:
    """Return size and stride of each dimension, outermost first; dimensions that are contiguous in memory are joined."""
    joined: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    assert math.prod(size for size, _ in joined) == tensor.numel(), "no element is lost"
    return joined


def _kernel() -> Any:
    try:
        from adaptra.runtime.devices.pack_kernel import copy_flat
    except ImportError as error:
        raise MissingExtraError("packing on a GPU needs triton: pip install 'adaptra[gpu]'") from error
    return copy_flat
