"""Checks that the graph of a torch.compile backend is valid for any number of rows, and that its results have rows too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from adaptra.errors import CaptureError
from adaptra.graph.capture.dynamo_graph import is_state, source_of
from adaptra.graph.ops.specs import dtype_name


class _TraceAgain(UnspecializeRestartAnalysis, TensorifyScalarRestartAnalysis):
    """Asks dynamo to trace the function again.

    Dynamo restarts without its progress so far on the first kind of exception. Only the second kind reaches dynamo from a
    backend.
    """


def require_any_batch(graph: fx.GraphModule, examples: Sequence[Any], microbatches: int) -> None:
    """Make sure that the graph is valid for the rows of a microbatch.

    A first trace assumes that all sizes are fixed, so it is repeated with a dynamic number of rows.

    Raises:
        CaptureError: The model's code depends on the number of rows.
    """
    inputs = _batched(graph, examples)
    fixed = [example for node, example in inputs if isinstance(node.meta["example_value"].shape[0], int)]
    if any(not hasattr(example, _MARKED) for example in fixed):
        for example in fixed:
            maybe_mark_dynamic(example, 0)
            setattr(example, _MARKED, True)
        raise _TraceAgain(restart_reason="adaptra needs a graph of any number of rows")
    for node, example in inputs:
        rows = example.shape[0]
        if not _holds_for(node.meta["example_value"].shape[0], rows // microbatches):
            raise CaptureError(
                f"{source_of(node).name}: what was traced for {rows} rows does not hold for the {rows // microbatches} of a "
                "microbatch: expected code for any batch size: don't compare or convert the size of the first dimension"
            )


def require_rows(graph: fx.GraphModule, examples: Sequence[Any], results: Sequence[Any]) -> None:
    """Make sure that every result has the rows of the inputs, so that the microbatches' results make up those of a batch.

    Args:
        graph, examples: The backend's arguments, already checked by :func:`require_any_batch`.
        results: The graph's results as traced by dynamo.

    Raises:
        CaptureError: A result has other rows. The text shows it.
    """
    rows = {_symbol(node.meta["example_value"].shape[0]) for node, _ in _batched(graph, examples)}
    for index, result in enumerate(results):
        if not isinstance(result, Tensor) or result.dim() == 0 or _symbol(result.shape[0]) not in rows:
            shown = f"{dtype_name(result.dtype)}{list(result.shape)}" if isinstance(result, Tensor) else f"the number {result}"
            for symbol in map(str, rows):
                shown = shown.replace(symbol, "rows")
            raise CaptureError(
                f"output {index} of the compiled function is {shown}: expected the rows of the batch as the first dimension of "
                "every output, as each microbatch makes its part of it; or the loss as the only output"
            )


def rows_of(graph: fx.GraphModule, examples: Sequence[Any]) -> int | None:
    """Return the number of rows of the batch for which a graph is compiled, or None if it takes no batch."""
    return next((example.shape[0] for _, example in _batched(graph, examples)), None)


def _batched(graph: fx.GraphModule, examples: Sequence[Any]) -> list[tuple[fx.Node, Tensor]]:
    """Return the inputs that are cut into microbatches."""
    return [
        (node, example)
        for node, example in zip(graph.graph.find_nodes(op="placeholder"), examples, strict=True)
        if isinstance(example, Tensor) and example.dim() > 0 and not is_state(node, example)
    ]


def _holds_for(size: int | torch.SymInt, rows: int) -> bool:
    """Return whether dynamo's assumptions about a size are also true for this number of rows."""
    if is_concrete_int(size):
        return False
    assert isinstance(size, torch.SymInt), "a size that is not known is symbolic"
    symbol, environment = size.node.expr, size.node.shape_env
    return all(guard.expr.subs(symbol, rows) != sympy.false for guard in environment.guards)


def _symbol(size: int | torch.SymInt) -> object:
    return size.node.expr if isinstance(size, torch.SymInt) else size


_MARKED: Final = "_adaptra_any_rows"
