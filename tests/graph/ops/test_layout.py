"""How tensors travel between stages: the receiver has the strides, and the gaps, that the sender had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from adaptra.graph.ops.layout import Layout, StrideNumbers
from adaptra.graph.ops.specs import TensorSpec

ROWS = torch.randn(4, 6, 24)
NUMBERS = torch.randn(3, 4, 5, dtype=torch.cfloat)
IMAGES = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)

FORMS: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: ROWS,
    "transposed": lambda: ROWS.mT,
    "channels last": lambda: IMAGES,
    "real": lambda: NUMBERS.real,
    "imaginary, transposed": lambda: NUMBERS.mT.imag,
    "columns": lambda: ROWS[:, :, 8:16],
    "columns, transposed": lambda: ROWS.mT[:, 8:16],
    "rows": lambda: ROWS[:, 2:4],
    "every third": lambda: ROWS[:, ::3, ::2],
    "one column": lambda: ROWS[..., 3],
    "some channels": lambda: IMAGES[:, 1:3],
    "one element": lambda: ROWS[0, 0, 3],
    "nothing": lambda: ROWS[:0, :, 8:16],
}


@pytest.mark.parametrize("name", FORMS)
def test_a_gradient_arrives_with_its_gaps(name: str) -> None:
    tensor = FORMS[name]()
    layout = Layout.with_gaps(tensor)
    sent = layout.pack(tensor)
    assert sent.is_contiguous() and sent.numel() == tensor.numel()
    arrived = layout.unpack(sent)
    assert torch.equal(arrived, tensor) and arrived.stride() == tensor.stride()


def test_what_is_no_part_of_a_dense_tensor_arrives_dense() -> None:
    repeated = torch.ones(3, 1).expand(3, 4)
    layout = Layout.with_gaps(repeated)
    assert layout == Layout.of(repeated)
    assert layout.unpack(layout.pack(repeated)).is_contiguous()


def test_columns_begin_as_far_from_an_aligned_place() -> None:
    columns = ROWS[:, :, 5:9]
    layout = Layout.with_gaps(columns)
    arrived = layout.unpack(layout.pack(columns))
    assert arrived.storage_offset() == columns.storage_offset() == 5


BATCHES: dict[str, Callable[[], Tensor]] = {
    **FORMS,
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
