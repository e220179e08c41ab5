"""One output of the model for a whole batch, joined from those of its microbatches.

Each microbatch's rows are copied to their place in the whole right after they are computed. So outputs are never there twice,
as they are while parts are joined at the end. A microbatch's own memory is free again at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import torch
from torch import Tensor

from adaptra.runtime.outputs.large_memory import LARGE, LargeMemory, is_available


class JoinedRows:
    """The rows of one output, microbatch by microbatch.

    Args:
        rows: The rows of each microbatch, of all tensors with rows; empty to join all parts at the end.
    """

    def __init__(self, rows: Sequence[int] = ()) -> None:
        self._rows: Final = rows
        self._whole: Tensor | None = None
        self._factor = 0
        self._parts: dict[int, Tensor] = {}

    def add(self, microbatch: int, part: Tensor, *, is_own: bool = True) -> None:
        """Take a microbatch's part.

        Args:
            microbatch: Its number.
            part: The output.
            is_own: Whether nothing else will write to its memory.
        """
        if self._whole is None and not self._parts:
            self._begin(microbatch, part)
        place = self._place(microbatch, part)
        if place is None:
            # Parts that are in their place already are joined with the others at the end.
            self._whole = None
            self._parts[microbatch] = part if is_own else part.clone()
        else:
            self._parts[microbatch] = place.copy_(part)

    def parts(self) -> dict[int, Tensor]:
        """Return the part of each microbatch, in order."""
        return dict(sorted(self._parts.items()))

    def joined(self) -> Tensor:
        """Return the output of the whole batch, in memory of its own.

        Rows are in the batch's order. Tensors without dimensions are averaged over the rows, as the loss is: each counts as
        often as its microbatch has rows. If they are integers, the average has torch's default dtype.
        """
        if self._whole is not None:
            return self._whole
        parts = self.parts()
        return join(list(parts.values()), [self._rows[one] for one in parts] if self._rows else ())

    def _begin(self, microbatch: int, part: Tensor) -> None:
        """Make the whole, if the part has as many rows as its microbatch, or a multiple of them."""
        if not self._rows or not part.dim() or not part.shape[0] or part.shape[0] % self._rows[microbatch]:
            return
        # Channels last is a format that only torch's own joining keeps.
        if part.layout is torch.strided and (part.dim() < 4 or part.is_contiguous()):
            self._factor = part.shape[0] // self._rows[microbatch]
            self._whole = _empty((self._factor * sum(self._rows), *part.shape[1:]), part)

    def _place(self, microbatch: int, part: Tensor) -> Tensor | None:
        """Return a part's place in the whole; None if it does not fit there."""
        whole = self._whole
        if whole is None or (part.dtype, part.device, part.shape[1:]) != (whole.dtype, whole.device, whole.shape[1:]):
            return None
        start, count = (self._factor * one for one in (sum(self._rows[:microbatch]), self._rows[microbatch]))
        return whole[start : start + count] if part.dim() and part.shape[0] == count else None


def join(parts: Sequence[Tensor], rows: Sequence[int] = ()) -> Tensor:
    """Return the output of microbatches with these numbers of rows; see :meth:`JoinedRows.joined`. None means equal ones."""
    if parts[0].dim():
        return torch.cat(list(parts))
    stacked = torch.stack(list(parts))
    if not (stacked.is_floating_point() or stacked.is_complex()):
        stacked = stacked.to(torch.get_default_dtype())
    if len(set(rows)) <= 1:
        return stacked.mean()
    return torch.stack([part * (own / sum(rows)) for part, own in zip(stacked.unbind(), rows, strict=True)]).sum()


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor without values."""
    size = prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < LARGE or not is_available():
        return like.new_empty(shape)
    return _MEMORY.bytes(size).view(like.dtype).view(shape)


_MEMORY: Final = LargeMemory()
