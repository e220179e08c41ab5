"""Tensors of one owner, as bytes and back: small ones packed, large ones from where they are, and views as copies."""

from __future__ import annotations

import torch
from torch import Tensor

from adaptra.runtime.data_parallel.collectives.owned_chunks import PACKED_BYTES, OwnedChunks

LARGE = PACKED_BYTES // 4 + 2


def tensors(scale: float) -> list[Tensor]:
    made: list[Tensor] = []
    for size in (3, LARGE, 0):
        pairs = scale * torch.complex(torch.arange(float(size)), torch.ones(size))
        made += [pairs.real.clone(), pairs, pairs.conj(), pairs.conj().imag, torch._neg_view(pairs.real.clone())]  # pyright: ignore[reportPrivateUsage]
    return [*made, scale * torch.ones(()), scale * torch.ones(LARGE, 2).t()]


def test_all_tensors_get_the_values_of_their_owner() -> None:
    owners, others = tensors(2.0), tensors(1.0)
    leaving, arriving = OwnedChunks(owners), OwnedChunks(others)
    for one, other in zip(leaving.flat, arriving.flat, strict=True):
        other.copy_(one)
    arriving.write_back()
    for one, other in zip(owners, others, strict=True):
        assert (one.is_conj(), one.is_neg(), one.stride()) == (other.is_conj(), other.is_neg(), other.stride())
        assert torch.equal(one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg())
