"""The inner compiler: another backend of torch.compile compiles the graphs of F, I and W.

It compiles the parts between random ops. Random ops stay unchanged, so that they draw the numbers of their microbatch. Fused
kernels may round differently, so results are only close to those of one process. All plans run the same kernels, so the plan
does not change the numbers.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch._dynamo import lookup_backend
from torch._dynamo.exc import InvalidBackend
from torch.fx.passes.split_module import split_module

from adaptra.errors import CaptureError, OptionError
from adaptra.graph.compile import CompiledStages
from adaptra.graph.ops.list_code import ListCodeGen
from adaptra.graph.ops.random_state import run_seeded
from adaptra.graph.stages.stage_graphs import EvalGraphs, StageGraphs
from adaptra.graph.stages.stages import EvalStage, TrainStage

EAGER: Final = "eager"
"""The inner compiler that compiles nothing: graphs run op by op."""


def check_inner(inner: object) -> None:
    """Refuse a value that is not the name of a backend that can compile stage graphs.

    Raises:
        OptionError: The value is refused. The text says what is expected.
    """
    try:
        is_known = isinstance(inner, str) and inner != "adaptra" and lookup_backend(inner) is not None
    except InvalidBackend:
        is_known = False
    if not is_known:
        raise OptionError(f"inner={inner!r}: expected another backend of torch.compile, such as 'eager' or 'inductor'")


def compiled_by(inner: str, compiled: CompiledStages) -> CompiledStages:
    """Return the same stages, with graphs compiled by ``inner`` at their first run, or earlier by :func:`prepare`."""
    if inner == EAGER:
        return compiled
    known: dict[fx.GraphModule, fx.GraphModule] = {}

    def change(graph: fx.GraphModule) -> fx.GraphModule:
        if graph not in known:
            known[graph] = _run_by(inner, graph)
        return known[graph]

    def changed(stage: Any) -> Any:
        return stage.with_graphs(change) if isinstance(stage, StageGraphs | EvalGraphs) else stage

    return replace(compiled, train=tuple(map(changed, compiled.train)), eval=tuple(map(changed, compiled.eval)))


def prepare(stage: TrainStage | EvalStage) -> None:
    """Compile the stage's graphs now instead of at their first run.

    Raises:
        CaptureError: The inner compiler fails. The text names the stage and the compiler, with its reason.
    """
    for graph in stage.graphs:
        for part in graph.modules():
            if isinstance(part, _InnerGraph):
                try:
                    part.prepare()
                except Exception as error:
                    reason = str(error).strip() or type(error).__name__
                    raise CaptureError(
                        f"stage {stage.index}: {part.inner!r} can't compile its graphs: {reason[:300]}: expected an inner "
                        "backend that takes any graph of ATen ops, as 'inductor' with a C++ compiler does, or 'eager'"
                    ) from error


class _InnerGraph(nn.Module):
    """A graph of ATen ops without random ones, compiled at its first run or by :meth:`prepare`."""

    def __init__(self, graph: fx.GraphModule, inner: str) -> None:
        super().__init__()
        self.inner = inner
        self._graph = graph
        self._compiled: Any = None

    def prepare(self) -> Callable[..., Sequence[Tensor]]:
        """Return the compiled graph. It is compiled only once."""
        with _COMPILING, torch.no_grad():
            if self._compiled is None:
                examples = [node.meta["val"] for node in self._graph.graph.find_nodes(op="placeholder")]
                self._compiled = lookup_backend(self.inner)(self._graph, examples)
        return self._compiled

    def __call__(self, *values: Tensor) -> Sequence[Tensor]:
        """Run it, without the hooks of all modules, which are for the user's."""
        return (self._compiled or self.prepare())(*values)


_COMPILING: Final = threading.Lock()
# Compilers keep their state in globals, and ranks may be threads of one process.


def _run_by(inner: str, graph: fx.GraphModule) -> fx.GraphModule:
    """Return a graph with the same call, in which the inner compiler compiles the parts between random ops."""
    part_of: dict[fx.Node, int] = {}
    part = 0
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is run_seeded:
            part += 2
        # An op's results are extracted in its own part, since only tensors pass between parts.
        of = part_of.get(node.args[0]) if node.target is operator.getitem else None
        part_of[node] = of if of is not None else part - 1 if node.target is run_seeded else part
    if not part_of:
        return graph
    split = split_module(graph, graph, part_of.__getitem__, keep_original_order=True)
    _return_tuples(split)
    for name, subgraph in list(split.named_children()):
        assert isinstance(subgraph, fx.GraphModule), "parts are graphs"
        if not any(node.target is run_seeded for node in subgraph.graph.nodes):
            setattr(split, name, _InnerGraph(subgraph, inner))
    split.graph.set_codegen(ListCodeGen())
    split.recompile()
    return split


def _return_tuples(split: fx.GraphModule) -> None:
    """Have parts with a single result return it in a tuple, as compilers expect. torch 2.11 can't split so itself."""
    for call in split.graph.find_nodes(op="call_module"):
        part = split.get_submodule(call.target)
        assert isinstance(part, fx.GraphModule), "parts are graphs"
        result = part.graph.output_node()
        if not isinstance(result.args[0], fx.Node):
            continue
        result.args = ((result.args[0],),)
        part.recompile()
        with split.graph.inserting_after(call):
            first = split.graph.call_function(operator.getitem, (call, 0))
        for user in [user for user in call.users if user is not first]:
            user.replace_input_with(call, first)
