"""The canonical sum of the replicas' terms, which names no worker: one expression with the same bits wherever it is evaluated.

The sum of T_0 … T_{P−1} is the left fold ((T_0 + T_1) + …) + T_{P−1}. The mean is this sum divided by P. Means of float16 are
made in float32 and rounded once, as the sum may overflow where its mean doesn't.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from adaptra.runtime.data_parallel.collectives import kernel_fold

BLOCK_BYTES: Final = 256 * 1024
"""Bytes of a tensor that a processor's thread adds up at a time. The running sum then stays in its cache."""


def dtype_of_sum(terms: torch.dtype, least: torch.dtype | None, *, mean: bool) -> torch.dtype:
    """Return the dtype of additions, and of the division for a mean.

    Args:
        terms: The dtype of the terms.
        least: The least precise one for floating-point numbers, or None for that of the terms. Whole numbers keep theirs.
        mean: Whether the sum is divided.
    """
    if mean and terms == torch.float16:
        least = torch.float32
    return torch.promote_types(terms, least) if least is not None and terms.is_floating_point else terms


def fold(terms: Sequence[Tensor], out: Tensor, divisor: int = 1, dtype: torch.dtype | None = None) -> None:
    """Write the left fold of the terms, divided by ``divisor``, to ``out``.

    Every element goes through the same operations, so a part of the tensors gives that part of the result. On a GPU one kernel
    does them all, or torch's additions where that doesn't run, with the same bits.

    Args:
        terms: At least two tensors of one dimension, one size and real dtypes, in the order of the sum. The first one may be a
            sum already.
        out: Of the same size. It may be one of the terms.
        divisor: The number of replicas for a mean, or 1 for a sum.
        dtype: Of the additions and of the division, or None for that of the first term. The result is then rounded to the dtype
            of ``out``.
    """
    dtype = dtype or terms[0].dtype
    is_known = all(one in kernel_fold.DTYPES for one in (dtype, out.dtype, *(term.dtype for term in terms)))
    if out.is_cuda and is_known and kernel_fold.runs_on(out.device):
        kernel_fold.fold_by_kernel(terms, out, divisor, dtype)
    else:
        _fold_by_torch(terms, out, divisor, dtype)


def _fold_by_torch(terms: Sequence[Tensor], out: Tensor, divisor: int, dtype: torch.dtype) -> None:
    block, by = out.numel() or 1, divisor
    if out.device.type == "cpu":
        block = min(block, BLOCK_BYTES // dtype.itemsize * torch.get_num_threads())
    elif divisor != 1:
        # On a GPU torch multiplies by the inverse of a number. A tensor it divides by, without a wait for the host.
        by = torch.full((1,), divisor, dtype=torch.promote_types(dtype, torch.float32), device=out.device)
    total = torch.empty(block, dtype=dtype, device=out.device)
    whole = [(out, *terms)]  # to split what is one block costs more than to add a small one
    blocks = whole if out.numel() <= block else zip(*(one.split(block) for one in whole[0]), strict=True)
    for target, first, *others in blocks:
        running = total[: target.numel()]
        if first.dtype != dtype:
            first = running.copy_(first)
        for term in others[:-1]:
            first = torch.add(first, term, out=running)
        last = others[-1]
        if divisor == 1:
            torch.add(first, last, out=target)
        else:
            torch.div(torch.add(first, last, out=running), by, out=target)
