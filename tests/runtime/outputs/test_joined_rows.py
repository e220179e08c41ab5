"""Outputs joined while they come are those that torch joins at the end: values, dtypes, strides, in any order."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adaptra.runtime.outputs.joined_rows import JoinedRows, join

UNEVEN = (3, 3, 2, 2)
KINDS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": lambda rows, seed: torch.full((rows, 5), float(seed)),
    "tokens": lambda rows, seed: torch.full((rows * 7, 2), seed, dtype=torch.int64),
    "bfloat16": lambda rows, seed: torch.full((rows, 2, 3), float(seed), dtype=torch.bfloat16),
    "truth": lambda rows, seed: torch.full((rows,), seed % 2 == 0),
    "transposed": lambda rows, seed: torch.full((5, rows), float(seed)).t(),
    "channels last": lambda rows, seed: torch.full((rows, 3, 2, 2), float(seed)).contiguous(memory_format=torch.channels_last),
    "other rows": lambda rows, seed: torch.full((5, 2), float(seed)),
    "rows of the first alone": lambda rows, seed: torch.full((6, 2), float(seed)),
    "other dtypes": lambda rows, seed: torch.full((rows, 2), seed, dtype=torch.float64 if seed == 2 else torch.float32),
    "no rows": lambda rows, seed: torch.full((0, 2), float(seed)),
    "scalar": lambda rows, seed: torch.tensor(float(seed)),
    "counts": lambda rows, seed: torch.tensor(seed),
}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
@pytest.mark.parametrize("rows", [UNEVEN, (2, 2, 2, 2), ()])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_joined_is_what_torch_joins(make: Callable[[int, int], Tensor], rows: tuple[int, ...], order: tuple[int, ...]) -> None:
    parts = [make((rows or UNEVEN)[microbatch], microbatch) for microbatch in range(4)]
    joined = JoinedRows(rows)
    for microbatch in order:
        joined.add(microbatch, parts[microbatch])
    found, expected = joined.joined(), join(parts, rows)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    assert all(torch.equal(one, part) for one, part in zip(joined.parts().values(), parts, strict=True))


def test_parts_in_others_memory_are_copied_before_it_changes() -> None:
    count, rows = torch.ones(()), torch.ones(2, 3)
    scalars, joined, late = JoinedRows((2, 2)), JoinedRows((2, 2)), JoinedRows()
    for microbatch in range(2):
        scalars.add(microbatch, count, is_own=False)
        joined.add(microbatch, rows, is_own=False)
        late.add(microbatch, rows, is_own=False)
        count += 1
        rows += 1
    assert scalars.joined().item() == 1.5
    for one in (joined, late):
        assert one.joined()[:, 0].tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex64])
def test_what_has_no_rows_is_averaged_over_the_rows_of_its_microbatches(dtype: torch.dtype) -> None:
    joined = JoinedRows((3, 3, 2))
    for microbatch, value in enumerate((1, 2, 5)):
        joined.add(microbatch, torch.tensor(value, dtype=dtype))
    found = joined.joined()
    assert found.dtype == (torch.get_default_dtype() if dtype is torch.int64 else dtype)
    assert found.item() == pytest.approx((3 * 1 + 3 * 2 + 2 * 5) / 8)


def test_a_microbatchs_memory_is_not_kept() -> None:
    joined, part = JoinedRows((2, 2)), torch.ones(2, 3)
    joined.add(0, part)
    part.zero_()
    joined.add(1, part)
    assert joined.joined().tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2


def test_a_large_output_is_a_tensor_like_any_other(tmp_path: Path) -> None:
    parts = [torch.randn(4, 512, 1024, dtype=torch.complex64) for _ in range(2)]
    joined = JoinedRows((4, 4))
    for microbatch, part in enumerate(parts):
        joined.add(microbatch, part)
    found = joined.joined()
    assert torch.equal(found, torch.cat(parts)) and found.is_contiguous() and not found.requires_grad
    torch.save(found, tmp_path / "outputs.pt")
    assert torch.equal(torch.load(tmp_path / "outputs.pt"), found)
    assert torch.equal(pickle.loads(pickle.dumps(found[2:3])), found[2:3])
    found += 1.0
    assert torch.equal(found, torch.cat(parts) + 1.0)
