"""The split of a traced piece into F, I and W graphs by its data dependencies.

F is the forward pass as traced, including changes in place. I is the part of the backward pass that the gradients of the inputs
depend on. W is the rest that the gradients of the weights depend on. Values that a later graph needs are kept. Views are not
kept but made again, since they cost nothing. Values in checkpointed regions are computed again too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from adaptra.graph.backward.trace import TracedPiece
from adaptra.graph.ops.checkpoints import repeatable
from adaptra.graph.ops.fake import fake_like
from adaptra.graph.ops.list_code import ListCodeGen
from adaptra.graph.ops.ops import arguments_of, call, changes_in_place, changes_unsaid, is_random, is_view_node, results_of
from adaptra.graph.ops.random_state import run_seeded

SavedNodes = tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class SplitPiece:
    """F, I and W of one piece, as lists of nodes of the traced graph (or of its functional form, after F).

    Attributes:
        forward: Nodes of F.
        kept: Nodes and placeholders of F that the backward pass needs, in order.
        backward_inputs: The nodes for ``kept``, then for the output gradients, in I and W. They are the same nodes unless the
            backward pass had to be made functional.
        input_grad, grad_inputs: Nodes of I, and its results.
        kept_by_input_grad: Nodes of I that W needs, in order.
        weight_grad, grad_weights: Nodes of W, and its results.
    """

    forward: tuple[fx.Node, ...]
    kept: SavedNodes
    backward_inputs: SavedNodes
    input_grad: tuple[fx.Node, ...]
    grad_inputs: SavedNodes
    kept_by_input_grad: SavedNodes
    weight_grad: tuple[fx.Node, ...]
    grad_weights: SavedNodes


def split(traced: TracedPiece) -> SplitPiece:
    """Split a traced piece. Call this inside the fake mode of the trace."""
    weights = tuple(node for _, node in traced.weights)
    backward, kept = _backward_part(traced, (*traced.grad_inputs, *weights))
    inputs = (*kept, *traced.grad_outputs)
    results = (*traced.grad_inputs, *weights)
    if any(changes_in_place(node.target) for node in backward):
        backward, inputs, results = _functional(backward, inputs, results)
    backward = _separate_convolutions(backward)
    grad_inputs, grad_weights = results[: len(traced.grad_inputs)], results[len(traced.grad_inputs) :]
    for_inputs = _closure(grad_inputs, backward)
    # Only tensors are kept. If W needs a result of an op of I that has several, I extracts that result.
    for_inputs |= {node for node in backward if _is_part_of(node, for_inputs)}
    for_weights, from_input_grad = _without(_closure(grad_weights, backward), for_inputs, grad_weights)
    return SplitPiece(
        forward=_forward_part(traced, kept),
        kept=kept,
        backward_inputs=inputs,
        input_grad=_in_order(for_inputs, backward),
        grad_inputs=grad_inputs,
        kept_by_input_grad=_in_order(from_input_grad, backward),
        weight_grad=_in_order(for_weights, backward),
        grad_weights=grad_weights,
    )


def forward_part(traced: TracedPiece, outputs: Sequence[fx.Node], absent: Collection[fx.Node] = ()) -> tuple[fx.Node, ...]:
    """Return the nodes of the forward pass that some outputs need, and the nodes with side effects.

    Side effects that need absent inputs, such as targets, are left out.
    """
    nodes = [node for node in traced.module.graph.nodes if node.op == "call_function" and node in traced.forward]
    effects = [node for node in nodes if changes_in_place(node.target) or changes_unsaid(node)]
    if absent:
        effects = [node for node in effects if not _needs(node, nodes, absent)]
    return _in_order(_closure([*outputs, *effects], nodes), nodes)


def build(
    inputs: Sequence[fx.Node],
    nodes: Iterable[fx.Node],
    outputs: Sequence[fx.Node],
    copied: Iterable[fx.Node],
    first_random: int | None,
    extra: Collection[fx.Node] = (),
) -> tuple[fx.GraphModule, int]:
    """Make a graph that takes one list of values, empties it, and returns a list.

    Args:
        inputs: The nodes for the values in the list. With ``first_random``, a RandomKey is the list's last element.
        nodes: The nodes to execute.
        outputs: The nodes to return.
        copied: The outputs of which a copy is returned.
        first_random: The ordinal of the first random op among ``nodes``, or None if random ops are left as they are.
        extra: Nodes that are not to change the ordinals of the others: their own ones come last.

    Returns:
        The graph and the number of its random ops.
    """
    graph = fx.Graph()
    rebuilt = {node: _placeholder(graph, node) for node in inputs}
    key = graph.placeholder("random") if first_random is not None else None
    nodes = list(nodes)
    drawing = [node for node in nodes if is_random(node.target, node.args, node.kwargs)] if key is not None else []
    ordinal = {node: number for number, node in enumerate(sorted(drawing, key=lambda node: node in extra), first_random or 0)}
    for node in nodes:
        args: Any = fx.map_arg(node.args, rebuilt.__getitem__)
        target: Any = node.target
        kwargs: Any = fx.map_arg(node.kwargs, rebuilt.__getitem__)
        if key is not None and node in ordinal:
            rebuilt[node] = graph.call_function(run_seeded, (key, ordinal[node], target, *args), kwargs)
        else:
            rebuilt[node] = graph.call_function(target, args, kwargs)
        rebuilt[node].meta = {"val": node.meta.get("val")}
    copies = set(copied)
    results = [_clone(graph, rebuilt[node]) if node in copies else rebuilt[node] for node in outputs]
    graph.output(results)
    graph.set_codegen(ListCodeGen())
    return fx.GraphModule(torch.nn.Module(), graph), len(drawing)


_aten = torch.ops.aten


def _clone(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.call_function(_aten.clone.default, (node,))
    made.meta = {"val": node.meta["val"].clone()}
    return made


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.placeholder(node.name)
    made.meta = {"val": node.meta.get("val")}
    return made


def _forward_part(traced: TracedPiece, kept: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    return forward_part(traced, [*traced.outputs, *kept])


def _backward_part(traced: TracedPiece, results: Sequence[fx.Node]) -> tuple[list[fx.Node], SavedNodes]:
    """Find the nodes that the backward pass runs.

    Views and nodes inside checkpointed regions of the forward pass run again in it.

    Returns:
        The nodes, those that run again included, and the other values of the forward pass that they need.
    """
    graph_nodes = list(traced.module.graph.nodes)
    backward = [node for node in graph_nodes if node.op == "call_function" and node not in traced.forward]
    effects = [node for node in backward if changes_in_place(node.target)]
    to_run = _closure([*results, *effects], backward)
    used = {one for node in to_run for one in node.all_input_nodes} | set(results)
    needed = used - to_run - set(traced.grad_outputs)
    again = repeatable(node for node in graph_nodes if node.op == "call_function" and node in traced.forward)
    repeated, bases = _trace_back(needed, lambda node: node in again or (node.op == "call_function" and is_view_node(node)))
    to_run |= repeated
    return list(_in_order(to_run, graph_nodes)), _in_order(bases, graph_nodes)


def _trace_back(nodes: Iterable[fx.Node], may_repeat: Callable[[fx.Node], bool]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Follow values back through nodes that may be repeated.

    Returns:
        The nodes to run again, and the values from which they start.
    """
    repeated: set[fx.Node] = set()
    bases: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if not may_repeat(node):
            bases.add(node)
        elif node not in repeated:
            repeated.add(node)
            waiting += node.all_input_nodes
    return repeated, bases


def _is_part_of(node: fx.Node, nodes: set[fx.Node]) -> bool:
    return node.target is operator.getitem and not is_view_node(node) and node.all_input_nodes[0] in nodes


def _closure(results: Iterable[fx.Node], among: Iterable[fx.Node]) -> set[fx.Node]:
    allowed = set(among)
    closure: set[fx.Node] = set()
    waiting = [node for node in results if node in allowed]
    while waiting:
        node = waiting.pop()
        if node not in closure:
            closure.add(node)
            waiting += [one for one in node.all_input_nodes if one in allowed]
    return closure


def _needs(node: fx.Node, among: Iterable[fx.Node], inputs: Collection[fx.Node]) -> bool:
    """Return whether a node depends on one of these inputs."""
    return any(one in inputs for each in _closure([node], among) for one in each.all_input_nodes)


def _without(weights: set[fx.Node], inputs: set[fx.Node], results: Sequence[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return W's nodes without those of I, and the nodes of I whose results W needs. W makes views of I again."""
    own = weights - inputs
    needed = ({one for node in own for one in node.all_input_nodes} | set(results)) & inputs
    views, bases = _trace_back(needed, lambda node: node in inputs and is_view_node(node))
    return own | views, {node for node in bases if node in inputs}


def _in_order(chosen: set[fx.Node], order: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(node for node in order if node in chosen)


def _functional(
    backward: Sequence[fx.Node], inputs: SavedNodes, results: SavedNodes
) -> tuple[list[fx.Node], SavedNodes, SavedNodes]:
    """Return the same computation without changes in place, so that it can be split."""

    def run(*values: Tensor) -> list[Any]:
        known: dict[fx.Node, Any] = dict(zip(inputs, values, strict=True))
        for node in backward:
            known[node] = call(node, fx.map_arg(node.args, known.__getitem__), fx.map_arg(node.kwargs, known.__getitem__))
        return [known[node] for node in results]

    examples = [fake_like(node.meta["val"]) for node in inputs]
    with torch.no_grad():
        functional = torch.func.functionalize(run, remove="mutations")
        graph = make_fx(functional, _disable_torch_fn_metadata_mode=True)(*examples).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return nodes, tuple(graph.find_nodes(op="placeholder")), results_of(graph)


def _separate_convolutions(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Replace the op that computes both gradients of a convolution by two ops, so that W can compute the weight's."""
    separated: list[fx.Node] = []
    for node in nodes:
        separated.append(node)
        if node.target is not _aten.convolution_backward.default:
            continue
        *args, wanted = arguments_of(node)
        if not (wanted[0] and any(wanted[1:])):
            continue
        with node.graph.inserting_after(node):
            weights = node.graph.call_function(_aten.convolution_backward.default, (*args, [False, *wanted[1:]]))
        weights.meta = {"val": (None, *node.meta["val"][1:])}
        node.args = (*args, [True, False, False])
        node.meta["val"] = (node.meta["val"][0], None, None)
        for user in list(node.users):
            index = arguments_of(user)[1]
            if index != 0:
                user.args = (weights, index)
        separated.append(weights)
    return separated
