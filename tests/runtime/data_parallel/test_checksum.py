"""Checksums of tensors differ where any bit, the order, the shape or the dtype does."""

from __future__ import annotations

import pytest
import torch

from adaptra.runtime.data_parallel import checksum
from adaptra.runtime.data_parallel.checksum import checksums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8])
def test_a_checksum_sees_values_order_shape_and_kind(dtype: torch.dtype) -> None:
    drawn = torch.arange(2 * 70_001).remainder(251).reshape(70_001, 2)
    given = (drawn % 2 == 0) if dtype is torch.bool else drawn.to(dtype)
    (number,) = checksums([given])
    assert checksums([given.clone(), given.t().contiguous().t()]) == [number, number]
    changed = given.clone()
    changed[70_000, 1] = changed[70_000, 0]
    others = [changed, given.flip(0), given.reshape(2, -1), given[1:], given.roll(1, 1)]
    found = checksums(others)
    assert number not in found and len(set(found)) == len(others)
    assert (
        checksums([torch.zeros(4), torch.zeros(4, dtype=torch.int32)])[0] != checksums([torch.zeros(4, dtype=torch.int32)])[0]
    )
    assert checksums([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_a_checksum_sees_every_bit(dtype: torch.dtype) -> None:
    whole = torch.randn(41, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensors = [whole, whole[1:], whole[0], whole[:0], whole[:40].view(5, 8).t()]
    assert checksums(tensors) == checksums([one.clone() for one in tensors])
    for one in tensors[:2]:
        for place in range(one.numel()):
            other = one.clone()
            other.view(-1)[place : place + 1].view(torch.uint8)[0] ^= 1
            assert checksums([other]) != checksums([one]), place
        assert checksums([one.neg()]) != checksums([one])


def test_a_checksum_is_the_same_on_hosts_and_by_kernels() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 9, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 3 * (1 << 16) + 5):
        numbers = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
        by_kernels = checksum._weighed_by_torch(numbers, checksum._weights(numbers.device))
        assert torch.equal(checksum._checksum(numbers), by_kernels), count
