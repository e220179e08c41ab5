"""The trace of one piece of the flat graph, forward and backward, as one graph of the ops that autograd really runs.

The backward pass is traced from autograd itself, so its formulas are torch's own. The order in which it sums the gradients of a
tensor with several uses is torch's too. The autograd engine runs nodes in the reverse order of their creation. So a gradient
from a later stage counts as the latest use and is summed first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from adaptra.errors import CaptureError
from adaptra.graph.ops.autocast import following_autocast
from adaptra.graph.ops.checkpoints import pass_on_region
from adaptra.graph.ops.fake import fake_like, run_node, without_onednn
from adaptra.graph.ops.layout import Layout
from adaptra.graph.ops.ops import arguments_of, results_of, returns_first_argument
from adaptra.graph.ops.specs import TensorSpec
from adaptra.graph.partition.analyze import Analysis
from adaptra.graph.partition.partition import Piece


@dataclass(frozen=True, slots=True)
class GradientMessage:
    """One tensor of the message that goes backward over an edge: the gradient of boundary tensor number ``of``."""

    of: int
    layout: Layout
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class TracedPiece:
    """One piece as a graph of ATen ops.

    Attributes:
        module: The traced graph.
        forward: Its nodes that belong to the forward pass.
        state, constants, inputs, targets, grad_outputs: Its placeholders.
        input_specs: The specs of the inputs.
        outputs: The nodes that are sent forward; on the last piece the results.
        output_specs: The specs of the outputs.
        grad_inputs: The nodes that are sent backward.
        grad_messages: The specs of ``grad_inputs``, and the inputs to which they belong.
        weights: The names of the parameters with a gradient, and the gradients' nodes. A parameter in ``used_later`` occurs
            once for each of its uses on this piece. The latest use comes first, as autograd adds them.
    """

    module: fx.GraphModule
    forward: frozenset[fx.Node]
    state: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, Tensor]
    inputs: tuple[fx.Node, ...]
    targets: tuple[fx.Node, ...]
    grad_outputs: tuple[fx.Node, ...]
    input_specs: tuple[TensorSpec, ...]
    outputs: tuple[fx.Node, ...]
    output_specs: tuple[TensorSpec, ...]
    grad_inputs: tuple[fx.Node, ...]
    grad_messages: tuple[GradientMessage, ...]
    weights: tuple[tuple[str, fx.Node], ...]


def trace_piece(
    module: fx.GraphModule,
    piece: Piece,
    analysis: Analysis,
    state: Mapping[fx.Node, str],
    constants: Mapping[fx.Node, Tensor],
    *,
    gradients: Sequence[GradientMessage] | None,
    is_last: bool,
    used_later: frozenset[str] = frozenset(),
) -> TracedPiece:
    """Trace one piece. Call this inside the fake mode of the analysis.

    Args:
        module: The flat graph's module.
        piece: The piece to trace.
        analysis: The analysis of the flat graph.
        state, constants: State and constants of the flat graph.
        gradients: The gradients that the next stage sends, or None to trace the forward pass only.
        is_last: Whether the outputs are results, which keep their layout.
        used_later: Parameters for which later pieces have gradients too. Autograd adds each use here to the sum of the later
            ones, so each use gets its own gradient.

    Raises:
        CaptureError: The model's own backward pass fails. The text names the stage and its modules, with torch's reason.
    """
    trace = _Trace(module, piece, analysis, state, gradients, is_last, used_later)
    arguments = trace.arguments()
    # The backward op of oneDNN's LSTM can't be traced. Without oneDNN the trace has the layer's own ops.
    with torch.set_grad_enabled(gradients is not None), without_onednn():
        try:
            traced = make_fx(trace, _disable_torch_fn_metadata_mode=True)(*arguments)
        except RuntimeError as error:
            reason = str(error).split(". Hint", 1)[0]
            raise CaptureError(
                f"stage {piece.index}, {_modules(piece, state)}: torch can't differentiate this part: {reason[:300]}"
            ) from error
    graph = traced.graph
    _use_one_name(graph)
    assert not graph.find_nodes(op="get_attr"), "a traced piece holds no tensor of its own"
    placeholders = iter(graph.find_nodes(op="placeholder"))
    state_nodes = {next(placeholders): state[node] for node in piece.state}
    constant_nodes = {next(placeholders): constants[node] for node in piece.constants}
    input_nodes = tuple(next(placeholders) for _ in piece.inputs)
    target_nodes = tuple(next(placeholders) for _ in piece.targets)
    results = results_of(graph)
    outputs, rest = results[: len(piece.outputs)], results[len(piece.outputs) :]
    grad_inputs, weights = rest[: len(trace.grad_messages)], rest[len(trace.grad_messages) :]
    answered = {message.of for message in gradients or ()}
    sent_back = {message.of for message in trace.grad_messages}
    return TracedPiece(
        module=traced,
        forward=frozenset(node for node in graph.nodes if _FORWARD in node.meta),
        state=state_nodes,
        constants=constant_nodes,
        inputs=input_nodes,
        targets=target_nodes,
        grad_outputs=tuple(placeholders),
        input_specs=tuple(
            trace.layout(node).spec(analysis.values[node], index in sent_back) for index, node in enumerate(piece.inputs)
        ),
        outputs=outputs,
        output_specs=tuple(
            trace.output_layout(node).spec(analysis.values[node], index in answered) for index, node in enumerate(piece.outputs)
        ),
        grad_inputs=grad_inputs,
        grad_messages=tuple(trace.grad_messages),
        weights=tuple(zip(trace.weights, weights, strict=True)),
    )


def _modules(piece: Piece, state: Mapping[fx.Node, str]) -> str:
    names = list(dict.fromkeys(state[node].rpartition(".")[0] for node in piece.state))
    return " to ".join(dict.fromkeys((names[0], names[-1]))) if names else "without state"


_FORWARD = "adaptra_forward"


class _Trace:
    """The function that is traced, and the information gathered while it runs."""

    __name__ = "stage"

    def __init__(
        self,
        module: fx.GraphModule,
        piece: Piece,
        analysis: Analysis,
        state: Mapping[fx.Node, str],
        gradients: Sequence[GradientMessage] | None,
        is_last: bool,
        used_later: frozenset[str],
    ) -> None:
        self._module = module
        self._piece = piece
        self._analysis = analysis
        self._state = state
        self._gradients = gradients
        self._is_last = is_last
        self._used_later = used_later
        self.grad_messages: list[GradientMessage] = []
        self.weights: list[str] = []

    def layout(self, node: fx.Node) -> Layout:
        """Return the layout in which a boundary node's value travels. The model's own inputs keep the user's layout."""
        value = self._analysis.values[node]
        return Layout(tuple(range(value.dim()))) if self._piece.index == 0 else Layout.of(value)

    def output_layout(self, node: fx.Node) -> Layout:
        """Return the layout in which an output travels. Results keep their layout."""
        value = self._analysis.values[node]
        return Layout(tuple(range(value.dim()))) if self._is_last else Layout.of(value)

    def arguments(self) -> list[Tensor]:
        """Return fake tensors for all placeholders of the traced graph."""
        piece, values = self._piece, self._analysis.values
        fakes = [fake_like(values[node], values[node].requires_grad) for node in piece.state]
        fakes += [fake_like(values[node]) for node in piece.constants]
        for node in piece.inputs:
            message = self.layout(node).pack(values[node].detach()) if piece.index else values[node]
            # Autocast keeps the casts of leaves, taking them for weights, but not those of views. Uses of an activation are
            # cast one by one in eager torch, and their gradients added in the activation's precision.
            with torch.no_grad():
                view = fake_like(message).view_as(message)
            fakes.append(view.requires_grad_(self._gradients is not None and values[node].requires_grad))
        fakes += [fake_like(values[node]) for node in piece.targets]
        fakes += [torch.empty(one.spec.shape, dtype=one.spec.dtype, device=self._device(one)) for one in self._gradients or ()]
        return fakes

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        piece = self._piece
        remaining = iter(arguments)
        values: dict[fx.Node, Any] = {node: next(remaining) for node in (*piece.state, *piece.constants)}
        parameters = {self._state[node]: values[node] for node in piece.state if values[node].requires_grad}
        received = [next(remaining) for _ in piece.inputs]
        for node, message in zip(piece.inputs, received, strict=True):
            values[node] = self.layout(node).unpack(message)
        values |= {node: next(remaining) for node in piece.targets}
        mode = get_proxy_mode()
        assert mode is not None
        traced = mode.tracer.graph.nodes
        with following_autocast() as enter_autocast:
            for node in piece.nodes:
                before = len(traced)
                enter_autocast(node)
                values[node] = run_node(self._module, node, values)
                pass_on_region(node, islice(reversed(traced), len(traced) - before))
        outputs = [self._output(node, values[node]) for node in piece.outputs]
        for node in traced:
            node.meta[_FORWARD] = True
        if self._gradients is None:
            return outputs
        return outputs + self._backward(outputs, received, parameters, list(remaining))

    def _output(self, node: fx.Node, value: Tensor) -> Tensor:
        if self._is_last:
            return value
        # A tensor that is only passed on gets its own node, made last, so that its gradient from the next stage is summed
        # first.
        if node in self._piece.inputs:
            value = _aten.alias.default(value)
        return self.output_layout(node).pack(value)

    def _backward(
        self,
        outputs: Sequence[Tensor],
        received: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        messages: Sequence[Tensor],
    ) -> list[Tensor]:
        gradients = self._gradients or ()
        roots = [outputs[one.of] for one in gradients]
        tangents = [one.layout.unpack(message) for one, message in zip(gradients, messages, strict=True)]
        wanted = [tensor for tensor in (*received, *parameters.values()) if tensor.requires_grad]
        uses = _list_uses(roots, {name: parameters[name] for name in parameters if name in self._used_later})
        if not roots or not wanted:
            grads: list[Tensor | None] = [None] * len(wanted)
        else:
            grads = list(torch.autograd.grad(roots, wanted, tangents, allow_unused=True))
        of = {id(tensor): gradient for tensor, gradient in zip(wanted, grads, strict=True)}
        sent: list[Tensor] = []
        for index, tensor in enumerate(received):
            gradient = of.get(id(tensor))
            if gradient is not None:
                layout = Layout.with_gaps(gradient)
                self.grad_messages.append(GradientMessage(index, layout, layout.spec(gradient, False)))
                sent.append(layout.pack(gradient))
        weights: list[Tensor] = []
        for name, parameter in parameters.items():
            gradient = of[id(parameter)]
            own = uses.get(name, [] if gradient is None else [gradient])
            self.weights += [name] * len(own)
            weights += own
        return sent + weights

    def _device(self, message: GradientMessage) -> torch.device:
        return self._analysis.values[self._piece.outputs[message.of]].device


def _list_uses(roots: Iterable[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return a list per name that autograd fills with the summands of that leaf's gradient, in the order of addition."""
    summands: dict[str, list[Tensor]] = {name: [] for name in leaves}
    of = {id(leaf): summands[name] for name, leaf in leaves.items()}
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None] if leaves else []
    seen = set(nodes)
    for node in nodes:
        following = [one for one, _ in node.next_functions]
        # Only the nodes of leaves have a variable.
        edges = {i: of[id(leaf)] for i, one in enumerate(following) if id(leaf := getattr(one, "variable", None)) in of}
        if edges:
            node.register_hook(_appending(edges))
        new = [one for one in dict.fromkeys(following) if one is not None and one not in seen]
        seen.update(new)
        nodes += new
    return summands


def _appending(edges: Mapping[int, list[Tensor]]) -> Callable[[Sequence[Tensor | None], object], None]:
    def append(grad_inputs: Sequence[Tensor | None], _: object) -> None:
        for index, uses in edges.items():
            gradient = grad_inputs[index]
            if gradient is not None:
                uses.append(gradient)

    return append


def _use_one_name(graph: fx.Graph) -> None:
    """Give each tensor one node, so that a tensor kept for the backward pass is kept once.

    Three kinds of node are replaced by their argument. Autograd detaches the tensors that it saves, which has no effect in
    graphs without autograd. An op in place returns its argument. A second transposition undoes the first.
    """
    for node in list(graph.nodes):
        if node.target in (_aten.detach.default, _aten.alias.default):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
        elif node.target is _aten.t.default and node.all_input_nodes[0].target is _aten.t.default:
            node.replace_all_uses_with(node.all_input_nodes[0].all_input_nodes[0])
            graph.erase_node(node)
        elif returns_first_argument(node.target):
            node.replace_all_uses_with(arguments_of(node)[0])


_aten = torch.ops.aten
