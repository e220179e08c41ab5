"""The first difference between two captures of one model, where values of constants count and not how they are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from adaptra.graph.ops.ops import is_random
from adaptra.graph.ops.value_dependent import place_of


def first_difference(
    program: torch.export.ExportedProgram, other: torch.export.ExportedProgram, state: frozenset[str]
) -> str | None:
    """Return the module and line of the first op that differs in two captures; None if they compute the same.

    Args:
        program, other: The captures. Tensors that an earlier call has left in the model are constants of the second one.
        state: The names of parameters and buffers, which are inputs of both.
    """
    mine, theirs = _lines(program, state), _lines(other, state)
    for (line, node), (its_line, its_node) in zip(mine, theirs, strict=False):
        if not _equal(line, its_line):
            return place_of(its_node if node.op == "output" else node)
    return None if len(mine) == len(theirs) else place_of(max(mine, theirs, key=len)[-1][1])


@dataclass(slots=True)
class _Reading:
    """What is known of the nodes of one graph: values of constants, numbers of the others."""

    values: dict[fx.Node, Any]
    numbers: dict[fx.Node, int]
    lines: list[tuple[list[Any], fx.Node]] = field(default_factory=list[tuple[list[Any], fx.Node]])

    def argument(self, leaf: Any, owner: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        if leaf in self.values:
            return self.values[leaf]
        if leaf.op == "get_attr":
            held = attrgetter(str(leaf.target))(owner)
            if not isinstance(held, fx.GraphModule):
                return held
            inner = _Reading({}, {node: at for at, node in enumerate(held.graph.nodes) if node.op == "placeholder"})
            inner.read(held)
            return tuple(tuple(line) for line, _ in inner.lines)
        return f"%{self.numbers[leaf]}"

    def read(self, module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if node.op not in ("call_function", "output"):
                continue
            leaves, form = pytree.tree_flatten((node.args, dict(node.kwargs)))
            arguments = [self.argument(leaf, module) for leaf in leaves]
            if node.op == "call_function" and self._is_constant(node, leaves, arguments):
                args, kwargs = pytree.tree_unflatten(arguments, form)
                self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]  # a captured graph calls functions only
                continue
            self.numbers[node] = len(self.numbers) + len(self.lines)
            # Not all ops write constants, but a later op sees these values; so each line has its own copy.
            kept = [one.detach().clone() if isinstance(one, Tensor) else one for one in arguments]
            self.lines.append(([str(node.target), str(form), *kept], node))

    def _is_constant(self, node: fx.Node, leaves: list[Any], given: list[Any]) -> bool:
        if not isinstance(node.target, OpOverload) and "getitem" not in str(node.target):
            return False
        return not is_random(node.target, node.args, node.kwargs) and all(
            not isinstance(leaf, fx.Node) or leaf in self.values for leaf in leaves
        )


def _lines(exported: torch.export.ExportedProgram, state: frozenset[str]) -> list[tuple[list[Any], fx.Node]]:
    """Return the ops that depend on state or on inputs, with their arguments, and the results."""
    held: Mapping[str, Any] = {**exported.constants, **exported.state_dict}
    values: dict[fx.Node, Any] = {}
    names: dict[str, str] = {spec.arg.name: spec.target or "" for spec in exported.graph_signature.input_specs}
    kinds = {spec.arg.name: spec.kind for spec in exported.graph_signature.input_specs}
    numbers: dict[fx.Node, Any] = {}
    inputs = 0
    for node in exported.graph_module.graph.nodes:
        if node.op != "placeholder":
            continue
        target = names[node.name]
        if kinds[node.name] is InputKind.USER_INPUT:
            numbers[node] = f"input {inputs}"
            inputs += 1
        elif target in state:
            numbers[node] = target
        else:
            value = held[target]
            values[node] = value.detach().clone() if isinstance(value, Tensor) else value
    reading = _Reading(values, numbers)
    with torch.no_grad():
        reading.read(exported.graph_module)
    return reading.lines


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        alike = value.shape == other.shape and value.dtype == other.dtype and value.stride() == other.stride()
        if value.is_meta or other.is_meta or not alike:
            return alike
        return torch.equal(value, other) or bool(((value == other) | (value.isnan() & other.isnan())).all())
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(_equal, value, other))
    return type(value) is type(other) and (value is other or bool(value == other) or repr(value) == repr(other) == "nan")
