"""Checksums of tensors: cheap, computed on the tensors' device, and equal wherever their bytes are equal.

The bytes are taken as 64-bit whole numbers, and their weighted sum is taken modulo 2**64. All weights are odd, so a change of
one number changes the sum. They depend on the position, so rows in another order have another sum. The upper half of each
number is added to its lower one before, else the highest bits, the signs of float64, would cancel in pairs. The checksum
protects against mistakes, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Final

import torch
from torch import Tensor

from adaptra import _C

_BLOCK: Final = 1 << 16
"""The numbers weighed at a time: they and their products stay in a core's cache."""


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return one checksum for each tensor, of its shape, dtype and values; tensors on the meta device have no values."""
    sums = [_checksum(one.detach()) for one in tensors]
    if len({one.device for one in sums}) > 1:  # else the host waits once
        sums = [one.cpu() for one in sums]
    found = [int(one) for one in torch.stack(sums).tolist()] if sums else []
    return [_signed(number * 31 + _kind(one.dtype, one.shape)) for number, one in zip(found, tensors, strict=True)]


@lru_cache(maxsize=4096)
def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return hash_of((str(dtype), *shape))


def hash_of(words: Sequence[object]) -> int:
    """Return a hash of some words, the same in every process."""
    hashed = 0
    for byte in "/".join(map(str, words)).encode():
        hashed = _signed(hashed * 1_099_511_628_211 + byte)
    return hashed


def _checksum(tensor: Tensor) -> Tensor:
    if tensor.is_meta or not tensor.numel():
        return torch.zeros((), dtype=torch.int64)
    numbers = _numbers(tensor)
    weights = _weights(tensor.device)
    if numbers.device.type == "cpu":  # the same number in a third of the time
        return torch.tensor(_C.weighted_sum(numbers.data_ptr(), len(numbers), weights.data_ptr(), len(weights)))
    return _weighed_by_torch(numbers, weights)


def _weighed_by_torch(numbers: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=numbers.device)
    for block in numbers.split(_BLOCK):
        weighed = (block >> 32).add_(block).mul_(weights[: len(block)])
        total = total * 6_364_136_223_846_793_005 + weighed.sum()
    return total


def _numbers(tensor: Tensor) -> Tensor:
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    rest = -len(data) % 8
    if rest or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(rest)])
    return data.view(torch.int64)


@cache
def _weights(device: torch.device) -> Tensor:
    drawn = torch.randint(-(2**62), 2**62, (_BLOCK,), generator=torch.Generator().manual_seed(19))
    return (drawn * 2 + 1).to(device)


def _signed(number: int) -> int:
    """Return the number modulo 2**64 as torch.int64 represents it."""
    return (number + 2**63) % 2**64 - 2**63
