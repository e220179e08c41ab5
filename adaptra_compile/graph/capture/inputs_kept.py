"""Copies of the inputs and targets that a model's code changes in place, so that no step writes into the user's batch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from adaptra.graph.ops.ops import is_view_node, written_by


def copy_what_changes(graph: fx.Graph, placeholders: Sequence[fx.Node]) -> None:
    """Copy, at the first use, each of the given placeholders that the graph changes in place.

    Args:
        graph: The graph. It is changed.
        placeholders: The placeholders of inputs and targets.
    """
    written, _ = _followed(graph, placeholders)
    order = {node: at for at, node in enumerate(graph.nodes)}
    for node in (one for one in placeholders if one in written):
        used = min(node.users, key=order.__getitem__)
        with graph.inserting_before(used):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {**used.meta, "val": node.meta.get("val")}
        for user in list(node.users):
            if user is not copy:
                user.replace_input_with(node, copy)


def _followed(graph: fx.Graph, given: Sequence[fx.Node]) -> tuple[set[fx.Node], list[fx.Node | None]]:
    """Return which of the given placeholders a graph changes, and whose memory each of its results is."""
    origin: dict[Any, fx.Node] = {node: node for node in given}
    of_regions: dict[fx.Node, list[fx.Node | None]] = {}
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        first = node.args[0] if node.args else None
        region = _region(node)
        if region is not None:
            held, operands = region
            inner = [one for one in held.graph.nodes if one.op == "placeholder"]
            changed, results = _followed(held.graph, inner)
            outer = {one: origin.get(operand) for one, operand in zip(inner, operands, strict=True)}
            written.update(one for one in map(outer.get, changed) if one is not None)
            of_regions[node] = [None if one is None else outer[one] for one in results]
        elif node.target is operator.getitem and first in of_regions:
            found = of_regions[first][node.args[1]]
            origin |= {} if found is None else {node: found}
        else:
            changes = [one for one in pytree.tree_leaves(written_by(node.target, node.args, node.kwargs)) if one in origin]
            written.update(origin[one] for one in changes)
            if first in origin and (first in changes or is_view_node(node)):
                origin[node] = origin[first]
    returned = graph.output_node().args[0]
    return written, [origin.get(one) for one in (returned if isinstance(returned, tuple | list) else (returned,))]


def _region(node: fx.Node) -> tuple[fx.GraphModule, Sequence[Any]] | None:
    """Return the graph that a node runs, such as one without gradients, and the values of the graph's placeholders."""
    for at, one in enumerate(node.args):
        if isinstance(one, fx.Node) and one.op == "get_attr":
            held = attrgetter(str(one.target))(node.graph.owning_module)
            if isinstance(held, fx.GraphModule):
                return held, node.args[at + 1 :]
    return None
