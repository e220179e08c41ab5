"""W that hands each gradient over as soon as it is computed, so that the sum over replicas may begin while W still runs.

The ops are those of the whole W, in the same order, so the bits are the same, and nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from adaptra.graph.ops.list_code import ListCodeGen
from adaptra.graph.ops.ops import results_of
from adaptra.graph.stages.stages import Take


def with_results_in_turn(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph that hands each result of ``module`` to a ``Take``, the last element of its list, and returns nothing."""
    graph = fx.Graph()
    rebuilt: dict[fx.Node, Any] = {}
    numbers: dict[fx.Node, list[int]] = {}
    for number, node in enumerate(results_of(module.graph)):
        numbers.setdefault(node, []).append(number)
    inputs = module.graph.find_nodes(op="placeholder")
    for node in inputs:
        rebuilt[node] = graph.node_copy(node, rebuilt.__getitem__)
    take = graph.placeholder("take")

    def hand_over(node: fx.Node) -> None:
        for number in numbers.get(node, ()):
            graph.call_function(_hand_over, (take, number, rebuilt[node]))

    for node in inputs:
        hand_over(node)
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            rebuilt[node] = graph.node_copy(node, rebuilt.__getitem__)
            hand_over(node)
    graph.output([])
    graph.set_codegen(ListCodeGen())
    return fx.GraphModule(module, graph)


def _hand_over(take: Take, number: int, result: Tensor) -> None:
    take(number, result)
