"""Tensors of one owner, as they travel to all other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

PACKED_BYTES: Final = 64 * 1024
"""The largest tensor that is copied to travel with others. A message costs as much as to copy some of these."""


class OwnedChunks:
    """Tensors of one owner as bytes: small ones packed into one chunk, and each of the others from where it is.

    Args:
        tensors: Dense, on one device.

    Attributes:
        flat: The chunks.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        found = [one.detach() for one in tensors if one.nbytes]
        small = [one for one in found if one.nbytes <= PACKED_BYTES]
        self._targets = [[one] for one in found if one.nbytes > PACKED_BYTES] + ([small] if small else [])
        self.flat: Final = [
            torch.cat(alone) if len(alone := list(map(_bytes, each))) > 1 else alone[0] for each in self._targets
        ]

    def write_back(self) -> None:
        """Write the chunks' values to the tensors that are not their memory."""
        for targets, chunk in zip(self._targets, self.flat, strict=True):
            for target, values in zip(targets, chunk.split([one.nbytes for one in targets]), strict=True):
                if target.data_ptr() != values.data_ptr():
                    # What begins inside of a pack may not lie where its dtype has to.
                    target.copy_(values.clone().view(target.dtype).view(target.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return real(tensor).contiguous().view(-1).view(torch.uint8)


def real(tensor: Tensor) -> Tensor:
    """Return a tensor without gradient, whose complex numbers are pairs: a copy of a view that negates or conjugates."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def write_real(values: Tensor, to: Tensor) -> None:
    """Write what :func:`real` made of a tensor to that tensor, unless it is its memory."""
    if values.data_ptr() != to.data_ptr():
        to.detach().copy_(torch.view_as_complex(values) if to.is_complex() else values)
