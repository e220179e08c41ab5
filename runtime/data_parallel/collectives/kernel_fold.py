"""The fold of a sum's terms on a GPU by one kernel, which reads each term once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from adaptra.runtime.devices import triton_trial

logger = logging.getLogger(__name__)

DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that the kernel adds."""

_BLOCK: Final = 1024


@lru_cache
def runs_on(device: torch.device) -> bool:
    """Return whether the kernel works on a device. The first call tries it, and logs why it doesn't."""

    def folds_rightly() -> bool:
        terms = [torch.tensor([one, -0.0], device=device) for one in (1.0, 1e-8, 1.0)]
        out = torch.empty_like(terms[0])
        fold_by_kernel(terms, out, 3, torch.float32)
        return torch.equal(out, ((terms[0] + terms[1]) + terms[2]) / torch.full_like(out, 3))

    reason = triton_trial.why_not(folds_rightly)
    if reason is not None:
        logger.info("sums over replicas on %s are added by torch, term by term: %s", device, reason)
    return reason is None


def fold_by_kernel(terms: Sequence[Tensor], out: Tensor, divisor: int, dtype: torch.dtype) -> None:
    """Do on the current stream what :func:`.fold.fold` does, for at least one term of one of :data:`DTYPES`."""
    import triton.language as tl  # pyright: ignore[reportMissingImports] - an extra

    from adaptra.runtime.data_parallel.collectives.fold_kernel import fold_flat

    kernel: Any = fold_flat
    count = out.numel()
    if count:
        kernel[(-(-count // _BLOCK),)](
            tuple(map(_readable, terms)),
            _readable(out),
            count,
            DTYPE=getattr(tl, str(dtype).removeprefix("torch.")),
            DIVISOR=divisor,
            BLOCK=_BLOCK,
        )


def _readable(tensor: Tensor) -> Tensor:
    """Return bfloat16 as its bits: the kernel rounds them by arithmetic, alike everywhere."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
