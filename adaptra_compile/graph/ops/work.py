"""Work of an op: floating-point operations and bytes moved, computed from shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from adaptra.graph.ops.ops import is_random, is_view
from adaptra.graph.ops.specs import tensor_bytes

FLOPS_PER_BYTE: Final = 16.0
"""Floating-point operations in the time that a device moves one byte. The value is of the order of a CPU core's.

On accelerators it is larger, so matrix products are even cheaper relative to other ops there.
"""


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations (a multiply-add is two) and bytes read and written."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def cost(self) -> float:
        """Time in units of one floating-point operation."""
        return self.flops + FLOPS_PER_BYTE * self.bytes


def work_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work:
    """Return the work of one call of an ATen op. Views, allocations and questions about a tensor's device are free."""
    if not isinstance(op, OpOverload) or is_view(op) or op.overloadpacket in _FREE:
        return Work()
    formula = _MORE_FORMULAS.get(op.overloadpacket) or flop_registry.get(op.overloadpacket)
    flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
    return Work(flops, sum(map(tensor_bytes, tensors)))


def flops_of_nodes(nodes: Iterable[fx.Node]) -> int:
    """Return the floating-point operations of traced nodes, whose values' shapes are in their ``val``."""

    def value(node: fx.Node) -> Any:
        return node.meta.get("val")

    total = 0
    for node in nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
            total += work_of(node.target, args, kwargs, value(node)).flops
    return total


class CountWork(TorchDispatchMode):
    """Adds up the work of every op dispatched while it is active, and detects random ops."""

    def __init__(self) -> None:
        super().__init__()
        self.total = Work()
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.random = self.random or is_random(func, args, kwargs)
        self.total += work_of(func, args, kwargs, result)
        return result


_aten = torch.ops.aten
# Fake tensors' kernels ask for the device, and how often depends on torch's version.
_FREE: Final = frozenset(
    {
        *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.lift_fresh),
        torch.ops.prim.device,
    }
)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Two products for each pair of a query and a key. Keys and values may have fewer heads than queries."""
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (width + value.shape[-1])


def _attention_backward_flops(_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """The scores again, then two products with the values' width and two with the keys'."""
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (3 * width + 2 * value.shape[-1])


# Torch counts attention on accelerators only, and torch 2.11 refuses keys that have fewer heads than queries.
_MORE_FORMULAS: Final[Mapping[Any, Any]] = {
    **dict.fromkeys(
        [
            _aten._scaled_dot_product_flash_attention_for_cpu,
            _aten._scaled_dot_product_flash_attention,
            _aten._scaled_dot_product_efficient_attention,
            _aten._scaled_dot_product_cudnn_attention,
        ],
        _attention_flops,
    ),
    **dict.fromkeys(
        [
            _aten._scaled_dot_product_flash_attention_for_cpu_backward,
            _aten._scaled_dot_product_flash_attention_backward,
            _aten._scaled_dot_product_efficient_attention_backward,
            _aten._scaled_dot_product_cudnn_attention_backward,
        ],
        _attention_backward_flops,
    ),
}
