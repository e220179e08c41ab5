"""Analysis of each node of a flat graph, by one run on fake tensors with autograd on.

It gives partitioning each node's cost, inputs, changes in place and the specs of its results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from adaptra.graph.capture.capture import FlatGraph
from adaptra.graph.ops.autocast import following_autocast
from adaptra.graph.ops.fake import run_node
from adaptra.graph.ops.ops import changes_unsaid, memory_of, version_of
from adaptra.graph.ops.value_dependent import refusing
from adaptra.graph.ops.work import CountWork, Work


@dataclass(frozen=True, slots=True)
class Analysis:
    """Results of the run of a flat graph.

    Attributes:
        nodes: The nodes that do something, in the order of execution.
        values: The fake result of every node and placeholder.
        requires_grad: Placeholders and nodes whose result requires a gradient.
        cost: The estimated time of each of ``nodes``, forward and backward, in units of one floating-point operation.
        free: Nodes that depend only on constants and unchanging buffers. Every stage that needs one computes it itself.
        changed: Index into ``nodes`` to the numbers of the memories that this node changes in place.
        memory: The number of the memory of each value.
        changed_state: The names of state that is changed in place.
    """

    nodes: tuple[fx.Node, ...]
    values: Mapping[fx.Node, Any]
    requires_grad: frozenset[fx.Node]
    cost: tuple[float, ...]
    free: frozenset[fx.Node]
    changed: Mapping[int, frozenset[int]]
    memory: Mapping[fx.Node, frozenset[int]]
    changed_state: frozenset[str]


def analyze(flat: FlatGraph, buffers: frozenset[str], example: Mapping[fx.Node, Tensor]) -> Analysis:
    """Run a flat graph on fake tensors. Call this inside the fake mode of ``example``, which has one tensor per placeholder.

    A node that returns one of its arguments unchanged is replaced by that argument, since autograd sums gradients per tensor.
    """
    values: dict[fx.Node, Any] = dict(example)
    nodes: list[fx.Node] = []
    cost: list[float] = []
    changed: dict[int, frozenset[int]] = {}
    touched: set[int] = set()
    random: set[fx.Node] = set()
    with following_autocast() as enter_autocast:
        for node in list(flat.module.graph.nodes):
            if node.op != "call_function" or node in flat.aside:
                continue
            arguments = _tensors(values[one] for one in node.all_input_nodes if one in values)
            versions = [version_of(tensor) for tensor in arguments]
            enter_autocast(node)
            with CountWork() as counted, refusing(node):
                values[node] = run_node(flat.module, node, values)
            written = [tensor for tensor, version in zip(arguments, versions, strict=True) if version_of(tensor) != version]
            written += _statistics(node, values)
            if written:
                changed[len(nodes)] = _memory(written)
                touched |= changed[len(nodes)]
            nodes.append(node)
            if counted.random:
                random.add(node)
            cost.append(_both_ways(counted.total, values[node], arguments))
            _forget_other_name(node, values)
    memory = {node: _memory(_tensors([value])) for node, value in values.items()}
    return Analysis(
        nodes=tuple(nodes),
        values=values,
        requires_grad=frozenset(node for node, value in values.items() if any(one.requires_grad for one in _tensors([value]))),
        cost=tuple(cost),
        free=_free(flat, buffers, nodes, frozenset(random), memory, touched),
        changed=changed,
        memory=memory,
        changed_state=frozenset(name for node, name in flat.state.items() if memory[node] & touched),
    )


def _both_ways(work: Work, result: Any, arguments: Iterable[Tensor]) -> float:
    # The backward pass of an op repeats about its forward work for every argument that gets a gradient.
    if not any(tensor.requires_grad for tensor in _tensors([result])):
        return work.cost
    return work.cost * (1 + min(2, sum(tensor.requires_grad for tensor in arguments)))


def _statistics(node: fx.Node, values: Mapping[fx.Node, Any]) -> list[Tensor]:
    if not changes_unsaid(node):
        return []
    return [values[one] for one in node.all_input_nodes if one.op == "placeholder" and not values[one].requires_grad]


def _forget_other_name(node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
    for argument in node.all_input_nodes:
        if argument in values and values[node] is values[argument]:
            node.replace_all_uses_with(argument)
            return


def _free(
    flat: FlatGraph,
    buffers: frozenset[str],
    nodes: Iterable[fx.Node],
    random: frozenset[fx.Node],
    memory: Mapping[fx.Node, frozenset[int]],
    touched: set[int],
) -> frozenset[fx.Node]:
    free = set(flat.constants) | {node for node, name in flat.state.items() if name in buffers}
    free = {node for node in free if not memory[node] & touched}
    for node in nodes:
        inputs = [one for one in node.all_input_nodes if one.op != "get_attr"]
        if node not in random and not memory[node] & touched and all(one in free for one in inputs):
            free.add(node)
    return frozenset(node for node in free if node.op == "call_function")


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, Tensor)]


def _memory(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(memory_of(tensor) for tensor in tensors)
