"""How tensors travel between stages: the receiver has the strides, and the gaps, that the sender had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from adaptra.graph.ops.layout import Layout

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
