"""Differentiate: from the pieces of a flat graph to stages that run F, I and W.

Stages are traced from the last to the first, since a stage's backward pass begins with what the stage behind it sends back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from adaptra.graph.analyze import Analysis
from adaptra.graph.capture import FlatGraph, StateNames
from adaptra.graph.memory import peak_bytes
from adaptra.graph.partition import Piece
from adaptra.graph.specs import MessageSpec, TensorSpec
from adaptra.graph.split import SplitPiece, build, forward_part, split
from adaptra.graph.stage_graphs import EvalGraphs, ForwardGraph, StageGraphs
from adaptra.graph.stages import Flops, Peaks
from adaptra.graph.trace import GradientMessage, Layout, TracedPiece, trace_piece
from adaptra.graph.work import flops_of_nodes


def differentiate(
    flat: FlatGraph,
    analysis: Analysis,
    parts: Sequence[Piece],
    holders: Mapping[str, tuple[int, ...]],
    names: StateNames,
    state_bytes: Mapping[str, int],
) -> tuple[StageGraphs, ...]:
    """Make the training stages; to be called inside the fake mode of the analysis.

    Args:
        flat: The training graph.
        analysis: Of it.
        parts: Its pieces.
        holders: Which stages hold each parameter and buffer.
        names: Of the model's state.
        state_bytes: The size of each parameter and buffer.
    """
    loss = analysis.values[flat.loss]
    gradients: tuple[GradientMessage, ...] = ()
    if loss.requires_grad:
        gradients = (GradientMessage(0, Layout(()), TensorSpec((), loss.dtype, False)),)
    last = len(parts) - 1
    traced: list[tuple[TracedPiece, tuple[GradientMessage, ...]]] = []
    trained: set[str] = set()
    for piece in reversed(parts):
        one = trace_piece(
            flat.module,
            piece,
            analysis,
            flat.state,
            flat.constants,
            gradients=gradients,
            is_last=piece.index == last,
            used_later=frozenset(trained),
        )
        trained |= {name for name, _ in one.weights}
        traced.append((one, gradients))
        gradients = one.grad_messages
    stages: list[StageGraphs] = []
    ordinal = 0
    for index, (one, received) in enumerate(reversed(traced)):
        held = [name for name, stages_of in holders.items() if index in stages_of]
        trainable = tuple(name for name in one.state.values() if name in trained)
        stage, ordinal = _stage(index, one, received, held, trainable, names, state_bytes, analysis.changed_state, ordinal)
        stages.append(stage)
    return tuple(stages)


def evaluate(flat: FlatGraph, analysis: Analysis, parts: Sequence[Piece]) -> tuple[EvalGraphs, ...]:
    """Make the evaluation stages; to be called inside the fake mode of the analysis. The last piece's outputs begin with the
    loss."""
    last = len(parts) - 1
    stages: list[EvalGraphs] = []
    ordinal = 0
    for piece in parts:
        is_last = piece.index == last
        one = trace_piece(flat.module, piece, analysis, flat.state, flat.constants, gradients=None, is_last=is_last)
        results = one.outputs[1:] if is_last else one.outputs
        forward, count = _forward_graph(one, results, (), ordinal, with_targets=not is_last)
        loss = _forward_graph(one, one.outputs[:1], (), ordinal, with_targets=True)[0] if is_last else None
        ordinal += count
        stages.append(
            EvalGraphs(
                index=piece.index,
                inputs=one.input_specs,
                outputs=one.output_specs[1:] if is_last else one.output_specs,
                loss=one.output_specs[:1] if is_last else (),
                targets=_specs(one.targets),
                _forward=forward,
                _loss=loss,
            )
        )
    return tuple(stages)


def _stage(
    index: int,
    traced: TracedPiece,
    received: Sequence[GradientMessage],
    held: Sequence[str],
    trainable: tuple[str, ...],
    names: StateNames,
    state_bytes: Mapping[str, int],
    changed_state: frozenset[str],
    ordinal: int,
) -> tuple[StageGraphs, int]:
    parts = split(traced)
    changed = [node for node in parts.kept if traced.state.get(node) in changed_state]
    forward, count = _forward_graph(traced, [*traced.outputs, *parts.kept], changed, ordinal, nodes=parts.forward)
    input_grad, input_grad_takes = _taking(
        parts.backward_inputs, parts.input_grad, (*parts.grad_inputs, *parts.kept_by_input_grad)
    )
    weight_grad, weight_grad_takes = _taking(
        parts.backward_inputs, parts.weight_grad, parts.grad_weights, parts.kept_by_input_grad
    )
    parameters = tuple(name for name in held if name in names.parameters)
    stage = StageGraphs(
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
        flops=Flops(flops_of_nodes(parts.forward), flops_of_nodes(parts.input_grad), flops_of_nodes(parts.weight_grad)),
        parameter_bytes=sum(state_bytes[name] for name in parameters),
        kept_after_forward=_kept_bytes(traced, parts, range(len(parts.kept))),
        kept_after_input_grad=_kept_bytes(traced, parts, weight_grad_takes)
        + sum(_size(node) for node in parts.kept_by_input_grad),
        peaks=Peaks(
            forward=peak_bytes(forward.module.graph, foreign=range(len(traced.state) + len(traced.constants))),
            input_grad=_backward_peak(input_grad, input_grad_takes, traced, parts, weight_grad_takes),
            weight_grad=_backward_peak(weight_grad, weight_grad_takes, traced, parts),
        ),
        _forward=forward,
        _input_grad=input_grad,
        _input_grad_takes=input_grad_takes,
        _weight_grad=weight_grad,
        _weight_grad_takes=weight_grad_takes,
    )
    return stage, ordinal + count


def _forward_graph(
    traced: TracedPiece,
    outputs: Sequence[fx.Node],
    copied: Sequence[fx.Node],
    ordinal: int,
    *,
    nodes: tuple[fx.Node, ...] | None = None,
    with_targets: bool = True,
) -> tuple[ForwardGraph, int]:
    nodes = forward_part(traced, outputs) if nodes is None else nodes
    inputs = [*traced.state, *traced.constants, *traced.inputs, *(traced.targets if with_targets else ())]
    module, count = build(inputs, nodes, outputs, copied, ordinal)
    return ForwardGraph(module, tuple(traced.state.values()), tuple(traced.constants.values())), count


def _taking(
    available: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], more: Sequence[fx.Node] = ()
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """A graph that takes only those of the available values that it uses, then ``more``; and which those are."""
    used = {one for node in nodes for one in node.all_input_nodes} | set(outputs)
    takes = tuple(index for index, node in enumerate(available) if node in used)
    module, _ = build([*(available[index] for index in takes), *more], nodes, outputs, (), None)
    return module, takes


def _kept_bytes(traced: TracedPiece, parts: SplitPiece, positions: Iterable[int]) -> int:
    """Bytes of values at these positions of I's inputs, without those that the stage holds anyway."""
    sources = (*parts.kept, *traced.grad_outputs)
    return sum(_size(sources[i]) for i in positions if sources[i] not in traced.state and sources[i] not in traced.constants)


def _backward_peak(
    module: fx.GraphModule, takes: Sequence[int], traced: TracedPiece, parts: SplitPiece, passed: Sequence[int] = ()
) -> int:
    """The bytes that I or W holds at most; with what I passes on to W and may not take itself."""
    sources = (*parts.kept, *traced.grad_outputs)
    foreign = [at for at, index in enumerate(takes) if sources[index] in traced.state or sources[index] in traced.constants]
    staying = [at for at, index in enumerate(takes) if index in passed]
    beside = _kept_bytes(traced, parts, [index for index in passed if index not in takes])
    return peak_bytes(module.graph, foreign=foreign, staying=staying) + beside


def _size(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size()


def _specs(nodes: Sequence[fx.Node]) -> MessageSpec:
    return tuple(TensorSpec(tuple(node.meta["val"].shape), node.meta["val"].dtype, False) for node in nodes)
