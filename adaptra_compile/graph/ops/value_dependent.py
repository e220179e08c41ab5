"""Errors for ops that no stage can run: ops whose results' shapes depend on values, and ops with sparse gradients."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.operator_schemas import normalize_function

from adaptra.errors import CaptureError

_LINE: Final = re.compile(r'File "([^"]+)", line (\d+)')
_CALL_NUMBER: Final = re.compile(r"@\d+")


@contextmanager
def refusing(node: fx.Node) -> Generator[None]:
    """Refuse a node of a captured model that no stage can run. The node runs on fake tensors within this context.

    Raises:
        CaptureError: The shape of its result depends on values, or its gradient is sparse. The text names the module and line.
    """
    if _has_sparse_gradient(node):
        raise CaptureError(
            f"{place_of(node)}: {node.target} with sparse=True: expected sparse=False, as stages add and send dense gradients"
        )
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise CaptureError(
            f"{place_of(node)}: {error.func}: what it returns has a shape, or is a number, that depends on the values of "
            "tensors: expected shapes that every microbatch has alike; use a mask, such as torch.where, in place of a choice"
        ) from error


def place_of(node: fx.Node) -> str:
    """Return the module and line of the user's model from which a node comes."""
    paths = [(str(path), kind) for path, kind in node.meta.get("nn_module_stack", {}).values()]
    module, kind = paths[-1] if paths else ("", "")
    name = (
        _CALL_NUMBER.sub("", module).removeprefix("_export_root.").removeprefix("model").removeprefix(".")
        or "(the model itself)"
    )
    kind = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    lines = _LINE.findall(node.meta.get("stack_trace") or "")
    own = [one for one in lines if Path(torch.__file__).parent not in Path(one[0]).parents]
    where = f" at {own[-1][0]}:{own[-1][1]}" if own else ""
    return f"module {name} ({kind.rpartition('.')[2]}){where}"


def _has_sparse_gradient(node: fx.Node) -> bool:
    if node.target not in _EMBEDDINGS:
        return False
    found = normalize_function(node.target, node.args, node.kwargs, normalize_to_only_use_kwargs=True)  # pyright: ignore[reportArgumentType]
    return found is not None and found.kwargs.get("sparse") is True


_EMBEDDINGS: Final = (
    torch.ops.aten.embedding.default,
    torch.ops.aten.embedding_bag.default,
    torch.ops.aten.embedding_bag.padding_idx,
)
