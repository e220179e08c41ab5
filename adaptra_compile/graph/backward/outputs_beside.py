"""F of the last stage that returns the model's outputs beside the loss. It is made when a step first asks for them.

Outputs that the loss needs are values of F anyway. Ops that only outputs need run in this graph and in no other one. The loss
and all saved values come from the same ops as without outputs. I, W and the other stages do not change.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from adaptra.errors import OptionError
from adaptra.graph.backward.differentiate import result_gradients, split_backward
from adaptra.graph.backward.split import build, forward_part
from adaptra.graph.backward.trace import trace_piece
from adaptra.graph.capture.batch import OutputFormat
from adaptra.graph.capture.capture import FlatGraph
from adaptra.graph.ops.autocast import following_autocast
from adaptra.graph.ops.fake import run_node
from adaptra.graph.ops.ops import results_of
from adaptra.graph.ops.random_state import run_seeded
from adaptra.graph.partition.analyze import Analysis
from adaptra.graph.partition.partition import Piece
from adaptra.graph.stages.stage_graphs import ForwardGraph, StageGraphs


class OutputsBeside:
    """Makes the graph of F with outputs of the last stage, once. Any thread may ask.

    Args:
        flat: The training graph.
        analysis: The analysis of the training graph.
        piece: The last piece of the training graph.
        stages: The training stages.
        outputs: The format of the model's outputs in training.
        mode: The fake mode of the analysis.
    """

    def __init__(
        self,
        flat: FlatGraph,
        analysis: Analysis,
        piece: Piece,
        stages: Sequence[StageGraphs],
        outputs: OutputFormat,
        mode: FakeTensorMode,
    ) -> None:
        self._flat = flat
        self._analysis = analysis
        self._piece = piece
        self._stages = stages
        self._outputs = outputs
        self._mode = mode
        self._making = threading.Lock()
        self._made: ForwardGraph | None = None

    def __call__(self) -> ForwardGraph:
        """Return the graph: its results are those of the stage's F, then the flat outputs.

        Raises:
            OptionError: An output is not there on the last stage. The text names it.
        """
        with self._making:
            if self._made is None:
                with self._mode:
                    self._made = self._make()
            return self._made

    def _make(self) -> ForwardGraph:
        flat, stage = self._flat, self._stages[-1]
        needed = self._needed()
        analysis = _with_values(flat, self._analysis, needed)
        traced = trace_piece(
            flat.module,
            self._wider(needed),
            analysis,
            flat.state,
            flat.constants,
            gradients=result_gradients(flat, self._analysis),
            is_last=True,
        )
        split = split_backward(traced, self._analysis.changed_state)
        losses = len(flat.results)
        loss, beside, kept = traced.outputs[:losses], traced.outputs[losses:], split.outputs[len(traced.outputs) :]
        alone = forward_part(traced, [*loss, *kept])
        module, _ = build(
            [*traced.state, *traced.constants, *traced.inputs, *traced.targets],
            split.forward,
            [*loss, *kept, *beside],
            split.copied,
            sum(_random_ops(one.graphs[0]) for one in self._stages[:-1]),
            frozenset(split.forward) - frozenset(alone),
        )
        forward_graph = ForwardGraph(module, tuple(traced.state.values()), tuple(traced.constants.values()))
        same = _looks(forward_graph.results[: len(loss) + len(kept)]) == _looks(results_of(stage.graphs[0].graph))
        assert same, "outputs beside the loss change neither the loss nor what F saves"
        return forward_graph

    def _needed(self) -> set[fx.Node]:
        """Return the nodes that the last stage runs for the outputs."""
        flat, own = self._flat, self._stages[-1].state_names
        there = {*self._piece.inputs, *self._piece.nodes, *flat.constants, *flat.targets}
        there |= {node for node, name in flat.state.items() if name in own}
        needed: set[fx.Node] = set()
        absent: list[str] = []
        for label, output in zip(self._outputs.labels, flat.beside, strict=True):
            extra = self._to_run(output, there)
            if extra is None:
                absent.append(label)
            else:
                needed |= extra
        if absent:
            raise OptionError(
                f"outputs: the model's {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} computed before the last "
                "stage, which gets what it computes the loss from only: expected outputs that the last stage has; leave these "
                "out in training (such as by use_cache=False), or give split= a later stage that begins earlier"
            )
        return needed

    def _to_run(self, output: fx.Node, there: Collection[fx.Node]) -> set[fx.Node] | None:
        """Return the nodes that an output needs in addition to values that are there, or None if it can't be computed."""
        to_run: set[fx.Node] = set()
        waiting = [output]
        while waiting:
            node = waiting.pop()
            if node in there or node in to_run or node.op == "get_attr":
                continue
            if node not in self._flat.aside and node not in self._analysis.free:
                return None
            to_run.add(node)
            waiting += node.all_input_nodes
        return to_run

    def _wider(self, needed: Collection[fx.Node]) -> Piece:
        """Return the last piece with these nodes and with the outputs."""
        flat, piece = self._flat, self._piece
        outputs = (*piece.outputs, *flat.beside)
        nodes = tuple(node for node in flat.module.graph.nodes if node in needed or node in set(piece.nodes))
        reads = {one for node in nodes for one in node.all_input_nodes} | set(outputs)
        return replace(
            piece,
            nodes=nodes,
            outputs=outputs,
            state=tuple(node for node in flat.state if node in reads),
            constants=tuple(node for node in flat.constants if node in reads),
        )


def _with_values(flat: FlatGraph, analysis: Analysis, needed: Collection[fx.Node]) -> Analysis:
    """Return the analysis with the values of nodes that are aside of the stages."""
    values: dict[fx.Node, Any] = dict(analysis.values)
    with following_autocast() as enter_autocast:
        for node in flat.module.graph.nodes:
            if node in needed and node not in values:
                enter_autocast(node)
                values[node] = run_node(flat.module, node, values)
    return replace(analysis, values=values)


def _random_ops(module: fx.GraphModule) -> int:
    return sum(node.target is run_seeded for node in module.graph.nodes)


def _looks(nodes: Sequence[fx.Node]) -> list[Any]:
    values: list[Tensor] = [node.meta["val"] for node in nodes]
    return [(value.shape, value.stride(), value.dtype) for value in values]
