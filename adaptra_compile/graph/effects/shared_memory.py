"""Tensors of a model that are different objects over one memory. On several ranks each would have a memory of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from adaptra.graph.ops.ops import memory_of


def overlapping(named: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of each two tensors that have an element's memory in common. Parts of one memory side by side have none.

    Args:
        named: Tensors by name. Several names of one tensor count as one.
    """
    distinct: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named.items():
        distinct.setdefault(id(tensor), (name, tensor))
    in_memory: defaultdict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in distinct.values():
        if _has_memory(tensor):
            in_memory[memory_of(tensor)].append((name, tensor))
    for together in in_memory.values():
        together.sort(key=lambda one: _bytes(one[1]).start)
        open_ones: list[tuple[str, Tensor]] = []
        for name, tensor in together:
            start = _bytes(tensor).start
            open_ones = [one for one in open_ones if _bytes(one[1]).stop > start]
            yield from ((other, name) for other, held in open_ones if _overlap(held, tensor))
            open_ones.append((name, tensor))


def _has_memory(tensor: Tensor) -> bool:
    is_strided: Any = tensor.layout == torch.strided
    return is_strided and type(tensor) in (Tensor, torch.nn.Parameter) and tensor.numel() > 0


def _bytes(tensor: Tensor) -> range:
    """Return the bytes of its memory from a tensor's first element to its last one."""
    start = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start * tensor.element_size(), (start + last + 1) * tensor.element_size())


def _is_dense(tensor: Tensor) -> bool:
    return len(_bytes(tensor)) == tensor.numel() * tensor.element_size()


def _overlap(tensor: Tensor, other: Tensor) -> bool:
    if _is_dense(tensor) and _is_dense(other):
        return True
    alike = (
        tensor.shape == other.shape and tensor.stride() == other.stride() and tensor.storage_offset() == other.storage_offset()
    )
    if alike and tensor.element_size() == other.element_size():
        return True
    start = min(_bytes(tensor).start, _bytes(other).start)
    numbers = torch.arange(max(_bytes(tensor).stop, _bytes(other).stop) - start)
    touched = torch.zeros_like(numbers, dtype=torch.bool)
    touched[_in(numbers, tensor, start)] = True
    return bool(touched[_in(numbers, other, start)].any())


def _in(memory: Tensor, tensor: Tensor, start: int) -> Tensor:
    """Return a tensor's bytes as a view of a memory with one element for each byte, which begins at byte ``start``."""
    width = tensor.element_size()
    strides = [stride * width for stride in tensor.stride()]
    return memory.as_strided((*tensor.shape, width), (*strides, 1), _bytes(tensor).start - start)
