"""What torch knows about ops, tensors and graphs, and keeps behind names with an underscore or types too wide to use."""

# pyright: reportPrivateUsage=false
# An op's schema and a tensor's version have no public name; this file is the only one that uses theirs.

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload


def is_view(op: Any) -> bool:
    """Whether an op only looks at its first argument's memory in another way, which is free and can be done again."""
    if not isinstance(op, OpOverload):
        return False
    if op is torch.ops.aten._unsafe_view.default:
        return True
    returned: Any = op._schema.returns
    return bool(returned) and all(one.alias_info is not None and not one.alias_info.is_write for one in returned)


def is_view_node(node: fx.Node) -> bool:
    """Whether a node is a view, or takes one out of an op that makes several."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0].target)
    return is_view(node.target)


def changes_in_place(op: Any) -> bool:
    """Whether an op changes one of its arguments, as far as its schema says."""
    return isinstance(op, OpOverload) and bool(op._schema.is_mutable)


def changes_unsaid(op: Any) -> bool:
    """Whether an op may change its arguments without its schema saying so: normalisation, its running statistics."""
    return any(word in str(op) for word in ("batch_norm", "instance_norm")) and "backward" not in str(op)


def changed_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node changes in place: those its op's schema says, and running statistics."""
    if changes_unsaid(node.target):
        return [one for one in node.all_input_nodes if one.op == "placeholder"]
    found: list[fx.Node] = []
    fx.map_arg(written_by(node.target, node.args, node.kwargs), found.append)
    return found


def written_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call of ``op`` that it changes, as far as its schema says."""
    if not isinstance(op, OpOverload) or not changes_in_place(op):
        return []
    arguments: Any = op._schema.arguments
    return [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def reads_values(op: Any) -> bool:
    """Whether an op hands values of tensors to Python."""
    return isinstance(op, OpOverload) and torch.Tag.data_dependent_output in op.tags


def returns_first_argument(op: Any) -> bool:
    """Whether an op changes its first argument in place and returns it."""
    if not isinstance(op, OpOverload):
        return False
    returned: Any = op._schema.returns
    arguments: Any = op._schema.arguments
    if len(returned) != 1 or not arguments:
        return False
    result, first = returned[0].alias_info, arguments[0].alias_info
    return result is not None and first is not None and result.is_write and result.before_set == first.before_set


def takes_generator(op: OpOverload) -> bool:
    """Whether a random op can be told where to draw from."""
    arguments: Any = op._schema.arguments
    return any(argument.name == "generator" for argument in arguments)


def is_random(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``op`` draws random numbers. Attention ops do only when they drop out something."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    arguments: Any = op._schema.arguments
    for position, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given != 0.0
    return True


def version_of(tensor: Tensor) -> int:
    """Counts the changes in place of a tensor and its views."""
    return tensor._version


def memory_of(tensor: Tensor) -> int:
    """A number for the memory a tensor lives in, its own as long as that memory is alive."""
    return tensor.untyped_storage()._cdata


def arguments_of(node: fx.Node) -> tuple[Any, ...]:
    """A node's positional arguments."""
    return node.args


def results_of(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The nodes a graph returns as a list or tuple."""
    returned: Any = graph.output_node().args[0]
    assert all(isinstance(node, fx.Node) for node in returned), f"a graph returns tensors only: {returned}"
    return tuple(returned)


def call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call what a ``call_function`` node calls."""
    assert callable(node.target), f"{node.op} {node}: a captured graph calls functions only"
    return node.target(*args, **kwargs)
