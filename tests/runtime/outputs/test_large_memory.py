"""Memory of outputs is used again once no tensor, view or array refers to it, and never before."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adaptra.runtime.outputs.large_memory import LargeMemory, is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="the system can't be told how memory is used")
SIZE = 3 * 1024 * 1024
KEEPS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda one: one,
    "a part of it": lambda one: one.view(torch.float32).view(-1, 4)[7:9],
    "a detached alias": lambda one: one[5:].detach(),
    "an array": lambda one: one.numpy()[10:20],
    "its storage": lambda one: one.untyped_storage(),
    "a graph of gradients": lambda one: (one.view(torch.float32) * torch.ones(1, requires_grad=True)).grad_fn,
    "a cycle": lambda one: [one],
}


def test_dropped_memory_is_used_again_and_for_other_sizes_is_not() -> None:
    memory = LargeMemory()
    first = memory.bytes(SIZE)
    assert (first.dtype, first.shape, first.data_ptr() % 4096) == (torch.uint8, (SIZE,), 0)
    address = first.data_ptr()
    del first
    other = memory.bytes(3 * SIZE)
    assert other.data_ptr() != address
    assert memory.bytes(SIZE + 1).data_ptr() == address


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_memory_to_which_anything_refers_is_not_used_again(keep: Callable[[Tensor], Any]) -> None:
    memory = LargeMemory()
    first = memory.bytes(SIZE).fill_(1)
    address, kept = first.data_ptr(), keep(first)
    if isinstance(kept, list):
        kept.append(kept)
    del first
    for _ in range(3):
        assert memory.bytes(SIZE).fill_(2).data_ptr() != address
    del kept
    gc.collect()
    assert address in [one.data_ptr() for one in [memory.bytes(SIZE) for _ in range(2)]]


def test_few_pieces_are_kept() -> None:
    memory = LargeMemory()
    pieces = [memory.bytes(SIZE) for _ in range(8)]
    addresses = {one.data_ptr() for one in pieces}
    del pieces
    gc.collect()
    assert len(addresses) == 8 and len(memory._kept) == 4
