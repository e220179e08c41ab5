"""What ops cost is the same with every torch, whose own counts and kernels differ between releases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from adaptra.graph.ops.work import CountWork, Work, work_of

ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def product(batch: int, rows: int, inner: int, columns: int) -> int:
    return 2 * batch * rows * inner * columns


@pytest.mark.parametrize("key_heads", [4, 2], ids=["as many heads", "grouped heads"])
def test_attention_costs_its_products(key_heads: int) -> None:
    query, key, value = torch.empty(2, 4, 5, 8), torch.empty(2, key_heads, 7, 8), torch.empty(2, key_heads, 7, 6)
    result, gradient = torch.empty(2, 4, 5, 6), torch.empty(2, 4, 5, 6)
    scores, mixed = product(2 * 4, 5, 8, 7), product(2 * 4, 5, 7, 6)
    assert work_of(ATTENTION, (query, key, value), {}, result).flops == scores + mixed
    gradients = product(2 * 4, 5, 6, 7) + product(2 * 4, 7, 5, 6) + product(2 * 4, 5, 7, 8) + product(2 * 4, 8, 5, 7)
    backward = work_of(BACKWARD, (gradient, query, key, value, result), {}, (query, key, value)).flops
    assert backward == scores + gradients


def test_questions_for_a_tensors_device_cost_nothing() -> None:
    """Kernels of fake tensors ask them, how often depends on torch's version, and cuts follow the cost."""
    x = torch.randn(64, 64)
    assert work_of(torch.ops.prim.device.default, (x,), {}, x.device) == Work()
    with CountWork() as real:
        torch.mm(x, x)
    with FakeTensorMode() as mode, CountWork() as fake:
        given = mode.from_tensor(x)
        torch.mm(given, given)
    assert fake.total == real.total == Work(flops=product(1, 64, 64, 64), bytes=3 * x.nbytes)
