"""The strides of batches that other replicas compute: what arrives has those that the sender has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adaptra.graph.ops.specs import TensorSpec
from adaptra.runtime.step_messages.stride_numbers import StrideNumbers

ROWS = torch.randn(4, 6, 24)
IMAGES = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)

BATCHES: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: ROWS,
    "transposed": lambda: ROWS.mT,
    "channels last": lambda: IMAGES,
    "imaginary, transposed": lambda: torch.randn(3, 4, 5, dtype=torch.cfloat).mT.imag,
    "columns, transposed": lambda: ROWS.mT[:, 8:16],
    "every third": lambda: ROWS[:, ::3, ::2],
    "some channels": lambda: IMAGES[:, 1:3],
    "nothing": lambda: ROWS[:0, :, 8:16],
    "repeated": lambda: torch.arange(3.0).view(3, 1).expand(3, 4),
    "repeated and transposed": lambda: torch.randn(1, 5, 2).expand(4, 5, 2).mT,
    "windows": lambda: torch.arange(9.0).unfold(0, 4, 2),
    "one row": lambda: ROWS[:1].as_strided((1, 6, 24), (7, 24, 1)),
    "a number": lambda: torch.tensor(3),
    "odd rows": lambda: torch.randn(6, 3)[3:],
    "nothing repeated": lambda: torch.ones(1, 1).expand(0, 3),
}


def test_a_batch_arrives_with_its_strides_and_as_far_from_an_aligned_place() -> None:
    batch = [one() for one in BATCHES.values()]
    numbers = StrideNumbers(tuple(TensorSpec(tuple(one.shape), one.dtype) for one in batch))
    sent = numbers.beside(batch)
    assert [(tuple(one.shape), one.dtype) for one in sent] == [(spec.shape, spec.dtype) for spec in numbers.specs]
    for arrived, tensor in zip(numbers.restore([one.contiguous().clone() for one in sent]), batch, strict=True):
        assert torch.equal(arrived, tensor) and arrived.stride() == tensor.stride()
        assert not tensor.numel() or arrived.data_ptr() % 64 == tensor.data_ptr() % 64


def test_what_arrives_as_it_was_is_not_copied() -> None:
    numbers, plain = StrideNumbers((TensorSpec((4, 6, 24), torch.float32),)), torch.empty(4, 6, 24)
    (arrived,) = numbers.restore(numbers.beside([plain]))
    assert arrived is plain
    assert StrideNumbers(()).specs == StrideNumbers(()).beside([]) == StrideNumbers(()).restore([]) == ()
