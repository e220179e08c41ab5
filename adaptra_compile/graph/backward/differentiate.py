"""Differentiation of the pieces of a flat graph into stages that run F, I and W.

Stages are traced from the last to the first, since a stage's backward pass begins with the gradients from the next stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from adaptra.graph.backward.peak_memory import peak_bytes, sharing_storage, storage_bytes
from adaptra.graph.backward.same_pieces import Tracer
from adaptra.graph.backward.split import SplitPiece, build, forward_part, split
from adaptra.graph.backward.trace import GradientMessage, TracedPiece
from adaptra.graph.capture.capture import FlatGraph, StateNames
from adaptra.graph.ops.fresh_tensors import fresh_results, reuse_sums
from adaptra.graph.ops.layout import Layout
from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.graph.ops.work import flops_of_nodes
from adaptra.graph.partition.analyze import Analysis
from adaptra.graph.partition.partition import Piece
from adaptra.graph.stages.stage_graphs import EvalGraphs, ForwardGraph, StageGraphs
from adaptra.graph.stages.stages import Flops, Peaks
from adaptra.progress import Progress


def differentiate(
    flat: FlatGraph,
    analysis: Analysis,
    parts: Sequence[Piece],
    holders: Mapping[str, tuple[int, ...]],
    names: StateNames,
    state_bytes: Mapping[str, int],
    progress: Progress,
) -> tuple[StageGraphs, ...]:
    """Make the training stages. Call this inside the fake mode of the analysis. Identical pieces share their graphs.

    Args:
        flat: The training graph.
        analysis: The analysis of the training graph.
        parts: The pieces of the training graph.
        holders: The stages that have each parameter and buffer.
        names: The names of the model's state.
        state_bytes: The size of each parameter and buffer, in bytes.
        progress: Called for every stage.
    """
    gradients = result_gradients(flat, analysis)
    last = len(parts) - 1
    tracer = Tracer(flat, analysis)
    backward: dict[tuple[fx.GraphModule, bool], BackwardGraphs] = {}
    traced: list[tuple[TracedPiece, tuple[GradientMessage, ...]]] = []
    trained: set[str] = set()
    for piece in reversed(parts):
        trace = tracer.trace(piece, gradients, is_last=piece.index == last, used_later=frozenset(trained))
        if (key := (trace.module, piece.index == 0)) not in backward:
            backward[key] = split_backward(trace, analysis.changed_state, is_first=piece.index == 0)
        trained |= {name for name, _ in trace.weights}
        traced.append((trace, gradients))
        progress("differentiated", len(traced), len(parts))
        gradients = trace.grad_messages
    stages: list[StageGraphs] = []
    forward = _Forward()
    for index, (trace, received) in enumerate(reversed(traced)):
        held = [name for name, stages_of in holders.items() if index in stages_of]
        trainable = tuple(name for name in trace.state.values() if name in trained)
        stages.append(
            _stage(index, trace, forward, backward[trace.module, index == 0], received, held, trainable, names, state_bytes)
        )
    return tuple(stages)


def evaluate(flat: FlatGraph, analysis: Analysis, parts: Sequence[Piece], progress: Progress) -> tuple[EvalGraphs, ...]:
    """Make the evaluation stages. Call this inside the fake mode of the analysis. Identical pieces share their graphs.

    If there is a loss, it is the first output of the last piece. ``progress`` is called for every stage.
    """
    last = len(parts) - 1
    tracer, forward = Tracer(flat, analysis), _Forward()
    stages: list[EvalGraphs] = []
    for piece in parts:
        trace = tracer.trace(piece, None, is_last=piece.index == last)
        losses = int(piece.index == last and flat.loss is not None)
        # Only one of the three graphs runs, so all draw the same random numbers.
        alone = _Forward(forward.next_random), _Forward(forward.next_random)
        loss = alone[0].graph(trace, trace.outputs[:1]) if losses else None
        both = alone[1].graph(trace, trace.outputs) if losses else None
        stages.append(
            EvalGraphs(
                index=piece.index,
                inputs=trace.input_specs,
                outputs=trace.output_specs[losses:],
                loss=trace.output_specs[:losses],
                targets=_specs(trace.targets),
                _forward=forward.graph(trace, trace.outputs[losses:], with_targets=False),
                _loss=loss,
                _both=both,
            )
        )
        progress("traced for evaluation", len(stages), len(parts))
    return tuple(stages)


class _Forward:
    """Makes forward graphs of the pieces of a model, from the first to the last.

    Random ops are numbered through the whole model, so only graphs without them can be shared.
    """

    def __init__(self, next_random: int = 0) -> None:
        self.next_random = next_random
        self._without_random: dict[fx.GraphModule, fx.GraphModule] = {}

    def graph(
        self,
        traced: TracedPiece,
        outputs: Sequence[fx.Node],
        copied: Sequence[fx.Node] = (),
        *,
        nodes: tuple[fx.Node, ...] | None = None,
        with_targets: bool = True,
    ) -> ForwardGraph:
        """Return the forward graph of one piece. Pieces that share a trace share this graph too."""
        module = self._without_random.get(traced.module)
        if module is None:
            nodes = forward_part(traced, outputs, () if with_targets else traced.targets) if nodes is None else nodes
            inputs = [*traced.state, *traced.constants, *traced.inputs, *(traced.targets if with_targets else ())]
            module, count = build(inputs, nodes, outputs, copied, self.next_random)
            self.next_random += count
            if not count:
                self._without_random[traced.module] = module
        return ForwardGraph(module, tuple(traced.state.values()), tuple(traced.constants.values()))


@dataclass(frozen=True, slots=True)
class BackwardGraphs:
    """A split piece: the contents of its forward graph, the graphs of I and W, and figures derived from them."""

    forward: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    copied: tuple[fx.Node, ...]
    input_grad: fx.GraphModule
    input_grad_takes: tuple[int, ...]
    weight_grad: fx.GraphModule
    weight_grad_takes: tuple[int, ...]
    fresh_gradients: tuple[bool, ...]
    flops: Flops
    kept_after_forward: int
    kept_after_input_grad: int
    peaks: Peaks  # but F's


def result_gradients(flat: FlatGraph, analysis: Analysis) -> tuple[GradientMessage, ...]:
    """Return the gradients with which the backward pass of a training graph begins: one for each result that has one."""
    return tuple(
        GradientMessage(index, layout, layout.spec(value, False))
        for index, node in enumerate(flat.results)
        if (value := analysis.values[node]).requires_grad
        for layout in (Layout(tuple(range(value.dim()))),)
    )


def split_backward(traced: TracedPiece, changed_state: frozenset[str], *, is_first: bool = False) -> BackwardGraphs:
    """Split a traced piece. Call this inside the fake mode of the trace.

    The first piece's inputs are the caller's batch, so they count as kept memory only where they are saved.
    """
    parts = split(traced)
    input_grad, input_grad_takes = _taking(
        parts.backward_inputs, parts.input_grad, (*parts.grad_inputs, *parts.kept_by_input_grad)
    )
    weight_grad, weight_grad_takes = _taking(
        parts.backward_inputs, parts.weight_grad, parts.grad_weights, parts.kept_by_input_grad
    )
    sources = (*parts.kept, *traced.grad_outputs)
    inputs = () if is_first else traced.inputs
    received = (*inputs, *traced.grad_outputs)
    return BackwardGraphs(
        forward=parts.forward,
        outputs=(*traced.outputs, *parts.kept),
        copied=tuple(node for node in parts.kept if traced.state.get(node) in changed_state),
        input_grad=input_grad,
        input_grad_takes=input_grad_takes,
        weight_grad=weight_grad,
        weight_grad_takes=weight_grad_takes,
        fresh_gradients=fresh_results(weight_grad.graph),
        flops=Flops(flops_of_nodes(parts.forward), flops_of_nodes(parts.input_grad), flops_of_nodes(parts.weight_grad)),
        kept_after_forward=_kept_bytes(traced, parts.kept, inputs),
        kept_after_input_grad=_kept_bytes(
            traced,
            [*(sources[index] for index in weight_grad_takes), *parts.kept_by_input_grad],
            received,
        ),
        peaks=Peaks(
            forward=0,
            input_grad=_backward_peak(input_grad, input_grad_takes, traced, parts, received, weight_grad_takes),
            weight_grad=_backward_peak(weight_grad, weight_grad_takes, traced, parts, received),
        ),
    )


def _stage(
    index: int,
    traced: TracedPiece,
    forward: _Forward,
    backward: BackwardGraphs,
    received: Sequence[GradientMessage],
    held: Sequence[str],
    trainable: tuple[str, ...],
    names: StateNames,
    state_bytes: Mapping[str, int],
) -> StageGraphs:
    parameters = tuple(name for name in held if name in names.parameters)
    graph = forward.graph(traced, backward.outputs, backward.copied, nodes=backward.forward)
    foreign = len(graph.state) + len(graph.constants)
    messages = range(foreign, foreign + len(traced.inputs)) if index else ()
    return StageGraphs(
        index=index,
        parameters=parameters,
        buffers=tuple(name for name in held if name in names.buffers),
        trainable=trainable,
        contributions=tuple(name for name, _ in traced.weights),
        inputs=traced.input_specs,
        outputs=traced.output_specs,
        targets=_specs(traced.targets),
        grad_inputs=tuple(one.spec for one in traced.grad_messages),
        grad_outputs=tuple(one.spec for one in received),
        flops=backward.flops,
        parameter_bytes=sum(state_bytes[name] for name in parameters),
        kept_after_forward=backward.kept_after_forward,
        kept_after_input_grad=backward.kept_after_input_grad,
        peaks=replace(
            backward.peaks,
            forward=peak_bytes(graph.module.graph, foreign=range(foreign), staying=messages),
        ),
        _forward=graph,
        _input_grad=backward.input_grad,
        _input_grad_takes=backward.input_grad_takes,
        _weight_grad=backward.weight_grad,
        _weight_grad_takes=backward.weight_grad_takes,
        _fresh_gradients=backward.fresh_gradients,
    )


def _taking(
    available: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], more: Sequence[fx.Node] = ()
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Build a graph that takes only the available values that it uses, then ``more``.

    Returns:
        The graph, and the positions of its inputs among the available values.
    """
    used = {one for node in nodes for one in node.all_input_nodes} | set(outputs)
    takes = tuple(index for index, node in enumerate(available) if node in used)
    module, _ = build([*(available[index] for index in takes), *more], nodes, outputs, (), None)
    reuse_sums(module.graph)
    module.recompile()
    return module, takes


def _kept_bytes(traced: TracedPiece, kept: Iterable[fx.Node], received: Iterable[fx.Node]) -> int:
    """Return the bytes that a microbatch keeps, without the stage's own state: what is saved, and the messages received so far.

    The runtime releases a message when the last op of its microbatch has run, whether that message's values are saved or not.
    """
    return storage_bytes([*kept, *received], apart_from=[*traced.state, *traced.constants])


def _backward_peak(
    module: fx.GraphModule,
    takes: Sequence[int],
    traced: TracedPiece,
    parts: SplitPiece,
    received: Sequence[fx.Node],
    passed: Sequence[int] = (),
) -> int:
    """Return the peak bytes of I or W. Received messages count, and values that I passes on to W without using them."""
    sources = (*parts.kept, *traced.grad_outputs)
    own = [*traced.state, *traced.constants]
    held = [*(sources[index] for index in passed), *received]
    taken = [sources[index] for index in takes]
    foreign = [at for at, node in enumerate(taken) if node in traced.state or node in traced.constants]
    peak = peak_bytes(module.graph, foreign=foreign, staying=sharing_storage(taken, held))
    return peak + storage_bytes(held, apart_from=[*own, *taken])


def _specs(nodes: Sequence[fx.Node]) -> MessageSpec:
    return tuple(TensorSpec(tuple(node.meta["val"].shape), node.meta["val"].dtype, False) for node in nodes)
