"""The weights of microbatches in the loss of their whole batch, as far as they depend on the batch alone.

A mean over labels leaves some out, and a sum is divided by a number, such as the sum of a mask. The captured graph says which
labels count and what divides. So a part of it is run, which needs no parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from adaptra.graph import CompiledStages
from adaptra.graph.capture.capture import FlatGraph
from adaptra.graph.compile import Captured
from adaptra.graph.ops.ops import changes_in_place, is_random
from adaptra.runtime.worker.stages.loss_reduction import NO_LABEL

aten: Final[Any] = torch.ops.aten

_MEANS_OF_LABELS: Final = {
    aten.cross_entropy_loss.default,
    aten.nll_loss.default,
    aten.nll_loss_nd.default,
    aten.nll_loss2d.default,
}
_SCALED: Final = {aten.div.Tensor, aten.div_.Tensor, aten.mul.Tensor, aten.mul_.Tensor}
_MOVES: Final = {
    aten.alias.default, aten.clone.default, aten.constant_pad_nd.default, aten.contiguous.default, aten.detach.default,
    aten.flatten.using_ints, aten.pad.default, aten.permute.default, aten.reshape.default, aten.select.int,
    aten.slice.Tensor, aten.squeeze.dim, aten.t.default, aten.to.device, aten.to.dtype, aten.to.dtype_layout,
    aten.transpose.int, aten.unsqueeze.default, aten.view.default,
}  # fmt: skip
"""Ops that move labels to other places, or leave some out, whatever the labels are."""

_NOT_RUN: Final = {aten._assert_tensor_metadata.default}


@dataclass(frozen=True, slots=True)
class Weights:
    """The weight of each microbatch in one mean of a loss.

    Attributes:
        values: One for each microbatch: numbers of labels, or what a sum is divided or multiplied by.
        rows: The rows of each microbatch.
        counts_labels: Whether they are numbers of labels.
    """

    values: tuple[float, ...]
    rows: tuple[int, ...]
    counts_labels: bool

    @property
    def are_alike(self) -> bool:
        """Whether each microbatch has the share of the weight that it has of the rows."""
        per_row = [value / rows for value, rows in zip(self.values, self.rows, strict=True)]
        return not all(map(math.isfinite, per_row)) or max(per_row) - min(per_row) <= 1e-3 * max(map(abs, per_row))

    def __str__(self) -> str:
        low, high = min(self.values), max(self.values)
        return f"have {low:g} to {high:g} labels" if self.counts_labels else f"scale their losses by {low:.4g} to {high:.4g}"


@dataclass(frozen=True, slots=True)
class LabelPlaces:
    """A mean over labels of one tensor, which the graph only moves: where those are that count.

    Attributes:
        tensor: The index of the tensor in the batch's flat inputs and targets.
        ignored: The label that doesn't count.
        first, last: The range of a row's labels among which the loss looks, in flat order.
    """

    tensor: int
    ignored: int
    first: int
    last: int

    @property
    def tensors(self) -> tuple[int, ...]:
        """The indices of the tensors that it needs."""
        return (self.tensor,)

    def of(self, batch: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the number of labels in each row of a batch in microbatches."""
        whole = torch.cat([microbatch[self.tensor] for microbatch in batch])
        whole = whole.view(len(whole), -1)
        return (whole[:, self.first : self.last] != self.ignored).sum(1)


@dataclass(frozen=True, slots=True)
class WeightGraph:
    """The part of a graph that computes a weight of one microbatch.

    Attributes:
        module: Takes the tensors and the constants.
        tensors: The indices of what it takes, in the batch's flat inputs and targets.
        constants: The other values that it takes.
        writes: Whether it changes a tensor in place, and so needs a copy.
        counts_labels: Whether the weight is a number of labels.
    """

    module: fx.GraphModule
    tensors: tuple[int, ...]
    constants: tuple[Tensor, ...]
    writes: bool
    counts_labels: bool

    def of(self, microbatch: Sequence[Tensor]) -> Tensor:
        """Return the weight of a microbatch."""
        given = [microbatch[index] for index in self.tensors]
        with torch.no_grad():
            return self.module(*([one.clone() for one in given] if self.writes else given), *self.constants)


def weights_of(compiled: CompiledStages) -> tuple[LabelPlaces | WeightGraph, ...]:
    """Return what computes the weights in the means of a training graph's loss; nothing if all rows count alike.

    Stages that are modules have no graph. Of their targets all labels but those that torch leaves out by default count.
    """
    captured = compiled.captured
    if captured is None:
        places = len(compiled.inputs.specs)
        return tuple(
            LabelPlaces(places + index, NO_LABEL, 0, math.prod(spec.shape[1:]))
            for index, spec in enumerate(compiled.targets.specs)
            if spec.dtype == torch.long and spec.shape
        )
    weights: list[LabelPlaces | WeightGraph] = []
    for node in captured.analysis.nodes:
        if node.op == "call_function" and (made := _weight_of(captured, node)) is not None:
            weights.append(made)
    return tuple(weights)


def _weight_of(captured: Captured, node: fx.Node) -> LabelPlaces | WeightGraph | None:
    """Return what computes the weight in the mean that this node takes, if it is one whose weight depends on the batch."""
    values = captured.analysis.values
    if node.target in _MEANS_OF_LABELS:
        arguments = _arguments(node)
        labels, weight, ignored = arguments["target"], arguments["weight"], arguments["ignore_index"]
        value = values.get(labels)
        if arguments["reduction"] != 1 or not isinstance(value, Tensor) or value.is_floating_point():
            return None
        part = _part(captured, [labels] if weight is None else [labels, weight])
        if part is None:
            return None
        moved = _places(captured.flat, part, labels, ignored) if weight is None else None
        if moved is not None:
            return moved
        return _graph(captured, part, (labels, weight), ignored)
    factors = _trained_last(node, values) if node.target in _SCALED else ()
    if len(factors) == 2 and values[factors[1]].requires_grad and not values[factors[0]].requires_grad:
        part = _part(captured, [factors[0]])
        return None if part is None else _graph(captured, part, (factors[0], None), None)
    return None


def _trained_last(node: fx.Node, values: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """Return the arguments that are tensors of one element, those with a gradient last. What divides has none."""
    operands = [one for one in node.args[:2] if isinstance(one, fx.Node) and isinstance(values.get(one), Tensor)]
    if node.target in {aten.div.Tensor, aten.div_.Tensor} and len(operands) == 2 and values[operands[1]].requires_grad:
        return []
    return sorted((one for one in operands if values[one].numel() == 1), key=lambda one: values[one].requires_grad)


def _arguments(node: fx.Node) -> dict[str, Any]:
    schema: Any = node.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given |= {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
    return given | dict(node.kwargs)


def _part(captured: Captured, ends: Sequence[fx.Node]) -> list[fx.Node] | None:
    """Return the nodes that values depend on, in order; None if it is not the batch alone, or none of the batch."""
    flat, analysis = captured.flat, captured.analysis
    needed: set[fx.Node] = set()
    waiting = list(ends)
    writers = [(analysis.nodes[index], memories) for index, memories in analysis.changed.items()]
    while waiting:
        node = waiting.pop()
        if node in needed:
            continue
        needed.add(node)
        if node in flat.state or node.op not in {"placeholder", "call_function"}:
            return None
        if node.op == "call_function" and is_random(node.target, node.args, node.kwargs):
            return None
        waiting += node.all_input_nodes
        waiting += [writer for writer, memories in writers if memories & analysis.memory.get(node, frozenset())]
    if not needed & {*flat.inputs, *flat.targets}:
        return None
    return [node for node in flat.module.graph.nodes if node in needed and node.target not in _NOT_RUN]


def _places(flat: FlatGraph, part: Sequence[fx.Node], labels: fx.Node, ignored: int) -> LabelPlaces | None:
    """Return where the labels are that count, if they are only moved and each row's are the same range of it."""
    placeholders = [node for node in part if node.op == "placeholder"]
    if len(placeholders) != 1 or any(node.target not in _MOVES for node in part if node.op == "call_function"):
        return None
    (source,) = placeholders
    value = source.meta["val"]
    rows, width = value.shape[0] if value.dim() else 1, math.prod(value.shape[1:])
    numbers = torch.arange(1, rows * width + 1).view(value.shape)
    module = _traced(part, lambda _, copied: copied[labels])
    reached = module(numbers).flatten()
    reached = reached[reached > 0].sort().values - 1
    in_row = reached[reached < width]
    if not len(in_row) or not value.dim():
        return None
    first, last = int(in_row[0]), int(in_row[-1]) + 1
    expected = torch.arange(rows * width).view(rows, width)[:, first:last].flatten()
    if not torch.equal(reached, expected):
        return None
    return LabelPlaces((*flat.inputs, *flat.targets).index(source), ignored, first, last)


def _graph(
    captured: Captured, part: Sequence[fx.Node], ends: tuple[fx.Node, fx.Node | None], ignored: int | None
) -> WeightGraph:
    """Return the part of the graph, followed by the count of labels or the sum of their weights, if they are labels."""
    flat = captured.flat
    batch = (*flat.inputs, *flat.targets)
    given = [node for node in part if node.op == "placeholder"]
    in_batch = [node for node in given if node in batch]
    ordered = [*in_batch, *(node for node in given if node not in batch)]

    def end(graph: fx.Graph, copied: Mapping[fx.Node, fx.Node]) -> fx.Node:
        last, weight = (None if one is None else copied[one] for one in ends)
        assert last is not None, "a part has an end"
        if ignored is None:
            return last
        if weight is None:
            return graph.call_function(_count, (last, ignored))
        return graph.call_function(_sum_of_weights, (last, ignored, weight))

    return WeightGraph(
        module=_traced([*ordered, *(node for node in part if node.op != "placeholder")], end),
        tensors=tuple(batch.index(node) for node in in_batch),
        constants=tuple(flat.constants[node] for node in ordered[len(in_batch) :]),
        writes=any(changes_in_place(node.target) for node in part if node.op == "call_function"),
        counts_labels=ignored is not None and ends[1] is None,
    )


def _traced(part: Sequence[fx.Node], end: Callable[[fx.Graph, Mapping[fx.Node, fx.Node]], fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in part:
        copied[node] = graph.node_copy(node, lambda one: copied[one])
    graph.output(end(graph, copied))
    return fx.GraphModule(torch.nn.Module(), graph)


def _count(labels: Tensor, ignored: int) -> Tensor:
    return (labels != ignored).sum()


def _sum_of_weights(labels: Tensor, ignored: int, weight: Tensor) -> Tensor:
    counts = labels != ignored
    return (weight[labels.where(counts, 0)] * counts).sum()
