"""Tensors of a graph that do not share their memory, and sums that reuse such memory as autograd does.

Autograd adds the gradients of a tensor with several uses into the first of them. It does not copy the first gradient of a
parameter. A traced graph shows neither: it makes a new tensor for every sum. Reuse changes the memory written, and no bit.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils import _pytree as pytree

from adaptra.graph.ops.ops import changes_in_place, is_view, memory_of, results_of

_aten = torch.ops.aten

MAKES_NEW: Final = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.baddbmm.default,
        _aten.cat.default,
        _aten.clone.default,
        _aten.sum.default,
        _aten.sum.dim_IntList,
        _aten.native_layer_norm_backward.default,
        _aten.embedding_dense_backward.default,
        _aten.convolution_backward.default,
        _aten.slice_backward.default,
        _aten.select_backward.default,
        _aten._softmax_backward_data.default,
        _aten._log_softmax_backward_data.default,
    }
)
"""Ops, besides elementwise ones, whose results are always new tensors.

Results of other ops are never reused. Dropout with p=0, for example, returns its argument although its schema does not say so.
"""


def reuse_sums(graph: fx.Graph) -> None:
    """Add in place if only the sum needs the first of two tensors, or else the second.

    Args:
        graph: Takes tensors and returns a list of them. Its nodes have fake tensors that share memory as the real ones will.
    """
    memory = _Memory(graph)
    for index, node in enumerate(graph.nodes):
        if node.target is _aten.add.Tensor and not node.kwargs and all(isinstance(one, fx.Node) for one in node.args):
            first, second = node.all_input_nodes * 2 if len(node.all_input_nodes) == 1 else node.all_input_nodes
            for into, other in ((first, second), (second, first)):
                if memory.is_free_after(into, index) and memory.of(into) != memory.of(other) and _are_alike(into, node):
                    node.target, node.args = _aten.add_.Tensor, (into, other)
                    memory.move(node, into)
                    break


def fresh_results(graph: fx.Graph) -> tuple[bool, ...]:
    """Return, per result, whether it is a whole tensor to which nothing else refers after the graph has run."""
    memory, results = _Memory(graph), results_of(graph)
    places = [memory.of(node) for node in results]
    return tuple(
        place in memory.fresh and places.count(place) == 1 and _is_whole(node)
        for node, place in zip(results, places, strict=True)
    )


class _Memory:
    """The memory of a graph's tensors: its number, the node that made it, and its last use."""

    def __init__(self, graph: fx.Graph) -> None:
        self.fresh: set[int] = set()
        self._nodes: dict[int, list[fx.Node]] = {}
        self._last_use: dict[int, int] = {}
        self._alive: list[Any] = []  # a number identifies a memory only while that memory is alive
        for index, node in enumerate(graph.nodes):
            for place in self._places(node):
                if place not in self._nodes and _makes_new(node):
                    self.fresh.add(place)
                self._nodes.setdefault(place, []).append(node)
            for one in (node, *node.all_input_nodes):
                self._last_use |= dict.fromkeys(self._places(one), index)

    def of(self, node: fx.Node) -> int | None:
        """Return the memory of a node's value, or None if the value is not one tensor."""
        value = node.meta.get("val")
        return memory_of(value) if isinstance(value, Tensor) else None

    def is_free_after(self, node: fx.Node, index: int) -> bool:
        """Return whether the graph made the tensor and no later node needs its memory. Results are needed to the end."""
        place = self.of(node)
        return place in self.fresh and self._last_use[place] == index and _is_whole(node)

    def move(self, node: fx.Node, into: fx.Node) -> None:
        """Record that a node's value and its views are in another node's memory now."""
        before, after = self.of(node), self.of(into)
        assert before is not None and after is not None, "sums are of tensors"
        target = into.meta["val"]

        def moved(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and memory_of(leaf) == before:
                flat = target.as_strided((target.numel(),), (1,)).view(leaf.dtype)  # a view may be of another dtype
                return flat.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
            return leaf

        for alias in self._nodes.pop(before):
            self._alive.append(alias.meta["val"])
            alias.meta["val"] = pytree.tree_map(moved, alias.meta["val"])
            self._nodes[after].append(alias)
        self._last_use[after] = self._last_use.pop(before)

    @staticmethod
    def _places(node: fx.Node) -> list[int]:
        return [memory_of(leaf) for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def _makes_new(node: fx.Node) -> bool:
    """Return whether a node's result always has its own memory."""
    op: Any = node.target
    if op in MAKES_NEW:
        return True
    if not isinstance(op, OpOverload) or is_view(op) or changes_in_place(op):
        return False
    return torch.Tag.pointwise in op.tags and torch.Tag.maybe_aliasing_or_mutating not in op.tags


def _is_whole(node: fx.Node) -> bool:
    """Return whether a tensor covers all of its memory, each element once."""
    value = node.meta["val"]
    return (
        is_non_overlapping_and_dense_or_false(value)
        and value.untyped_storage().nbytes() == value.numel() * value.element_size()
    )


def _are_alike(one: fx.Node, other: fx.Node) -> bool:
    """Return whether two tensors have the same shape, dtype, strides and device."""
    first, second = one.meta["val"], other.meta["val"]
    return (first.shape, first.dtype, first.stride(), first.device) == (
        second.shape,
        second.dtype,
        second.stride(),
        second.device,
    )
