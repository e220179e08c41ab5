"""The canonical sum of the replicas' terms, which names no worker: one expression with the same bits wherever it is evaluated.

The sum of T_0 … T_{P−1} is the left fold ((T_0 + T_1) + …) + T_{P−1} in the terms' dtype. The mean is this sum divided by P.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fold(terms: Sequence[Tensor], out: Tensor, divisor: int = 1) -> None:
    """Write the left fold of the terms, divided by ``divisor``, to ``out``.

    Every element goes through the same operations, so a part of the tensors gives that part of the result.

    Args:
        terms: Tensors of one shape and real dtype, in the order of the sum. The first one may be a sum already.
        out: Of the same shape and dtype. It may be one of the first two terms; with more terms it is no later one.
        divisor: The number of replicas for a mean, or 1 for a sum.
    """
    first, *others = terms
    if not others and out is not first:
        out.copy_(first)
    total = first
    for term in others:
        total = torch.add(total, term, out=out)
    if divisor != 1:
        out /= divisor
