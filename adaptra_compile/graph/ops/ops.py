"""Properties of ops, tensors and graphs for which torch has only private names or types that are too wide."""

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
    """Return whether an op only returns a view of its first argument's memory. A view is free and can be made again."""
    if not isinstance(op, OpOverload):
        return False
    if op is torch.ops.aten._unsafe_view.default:
        return True
    returned: Any = op._schema.returns
    return bool(returned) and all(one.alias_info is not None and not one.alias_info.is_write for one in returned)


def is_view_node(node: fx.Node) -> bool:
    """Return whether a node is a view, or one of several views made by one op."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0].target)
    return is_view(node.target)


def changes_in_place(op: Any) -> bool:
    """Return whether an op changes one of its arguments, according to its schema."""
    return isinstance(op, OpOverload) and bool(op._schema.is_mutable)


def changes_unsaid(node: fx.Node) -> bool:
    """Return whether a node may change arguments without its op's schema saying so: normalisation and its running statistics.

    One that uses its statistics, as in evaluation, changes none.
    """
    op = node.target
    if "backward" in str(op) or not any(word in str(op) for word in ("batch_norm", "instance_norm")):
        return False
    arguments: Any = op._schema.arguments if isinstance(op, OpOverload) else ()
    given = dict(zip((one.name for one in arguments), node.args, strict=False)) | node.kwargs
    return not any(given.get(name) is False for name in ("training", "use_input_stats"))


def changed_by(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values a node changes in place: those in its op's schema, and running statistics."""
    if changes_unsaid(node):
        return [one for one in node.all_input_nodes if one.op == "placeholder"]
    found: list[fx.Node] = []
    fx.map_arg(written_by(node.target, node.args, node.kwargs), found.append)
    return found


def written_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a call of ``op`` changes, according to its schema."""
    if not isinstance(op, OpOverload) or not changes_in_place(op):
        return []
    arguments: Any = op._schema.arguments
    return [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def reads_values(op: Any) -> bool:
    """Return whether an op returns values of tensors to Python."""
    return isinstance(op, OpOverload) and torch.Tag.data_dependent_output in op.tags


def returns_first_argument(op: Any) -> bool:
    """Return whether an op changes its first argument in place and returns it."""
    if not isinstance(op, OpOverload):
        return False
    returned: Any = op._schema.returns
    arguments: Any = op._schema.arguments
    if len(returned) != 1 or not arguments:
        return False
    result, first = returned[0].alias_info, arguments[0].alias_info
    return result is not None and first is not None and result.is_write and result.before_set == first.before_set


def takes_generator(op: OpOverload) -> bool:
    """Return whether a random op takes a generator."""
    arguments: Any = op._schema.arguments
    return any(argument.name == "generator" for argument in arguments)


def is_random(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of ``op`` draws random numbers. Attention ops do so only with dropout."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    arguments: Any = op._schema.arguments
    for position, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given != 0.0
    return True


def version_of(tensor: Tensor) -> int:
    """Return the number of changes in place of a tensor and its views."""
    return tensor._version


def memory_of(tensor: Tensor) -> int:
    """Return a number for a tensor's memory, unique while that memory is alive."""
    return tensor.untyped_storage()._cdata


def arguments_of(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's positional arguments."""
    return node.args


def results_of(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the nodes a graph returns as a list or tuple."""
    returned: Any = graph.output_node().args[0]
    assert all(isinstance(node, fx.Node) for node in returned), f"a graph returns tensors only: {returned}"
    return tuple(returned)


def call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call the target of a ``call_function`` node."""
    assert callable(node.target), f"{node.op} {node}: a captured graph calls functions only"
    return node.target(*args, **kwargs)
