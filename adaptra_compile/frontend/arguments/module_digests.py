"""Digests of a captured graph by module, by which the ranks of a job notice that their models' code differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import fx
from torch.utils import _pytree as pytree

from adaptra.graph.capture.capture import FlatGraph
from adaptra.runtime.data_parallel.checksum import checksums

_PLAIN: Final = (bool, int, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format)


def module_digests(captured: FlatGraph) -> dict[str, str]:
    """Return a digest of each module's ops, with all their arguments, by the module's name; of the loss's ops by "".

    Equal graphs have equal digests in every process, on devices of one type. Constants of the model's code count by value.
    """
    sums = checksums(list(captured.constants.values()))
    names = {node: f"constant {one}" for node, one in zip(captured.constants, sums, strict=True)}
    digests: dict[str, Any] = {}
    for node in captured.module.graph.nodes:
        names.setdefault(node, f"%{len(names)}")
        if node.op != "placeholder":
            path = captured.placements.get(node, ())
            within = digests.setdefault(path[-1] if path else "", hashlib.sha256())
            within.update(f"{_text(node, names)}\n".encode())
    return {name: one.hexdigest()[:16] for name, one in digests.items()}


def _text(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    if node.op == "get_attr":
        held = getattr(node.graph.owning_module, str(node.target), None)
        if not isinstance(held, fx.GraphModule):
            return "attribute"
        # The body of a higher-order op.
        inner = {one: f"%{index}" for index, one in enumerate(held.graph.nodes)}
        return f"[{'; '.join(_text(one, inner) for one in held.graph.nodes)}]"
    leaves, form = pytree.tree_flatten((node.args, dict(node.kwargs)))
    given = pytree.tree_unflatten([_argument(one, names) for one in leaves], form)
    return f"{node.target if node.op == 'call_function' else node.op} {given}"


def _argument(value: object, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, torch.device):  # each rank has an index of its own
        return value.type
    return repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__
