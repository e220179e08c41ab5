"""What of an op's call is compared between eager torch and stages: its name, its scalars, and what its tensors look like.

Set aside is what costs nothing or changes no number: views, which are seen in the strides of what reads them, whether a result
is written in place, and which of two tensors a sum begins with.
"""

# pyright: reportPrivateUsage=false
# An op's schema has no public name.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from adaptra.graph.ops.ops import is_view, reads_values
from adaptra.graph.ops.random_state import run_seeded
from adaptra.graph.ops.specs import dtype_name

Signature = tuple[str, tuple[str, ...]]
"""The op's name and each argument as text."""

_aten = torch.ops.aten

_COPIES: Final = frozenset(
    {
        _aten.clone.default,
        _aten.lift_fresh_copy.default,
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.copy_.default,
        _aten.copy.default,
        _aten.constant_pad_nd.default,
        _aten.select_scatter.default,
        _aten.slice_scatter.default,
        _aten.diagonal_scatter.default,
        _aten.as_strided_scatter.default,
    }
)
_COMMUTE: Final = frozenset({"aten.add.Tensor", "aten.mul.Tensor"})
"""Ops whose result is rounded once, so that neither order nor strides matter: what crosses stages becomes dense."""


def is_set_aside(op: Any) -> bool:
    """Whether calls of an op are not compared: views, reads, and what only makes room or another copy."""
    return is_view(op) or reads_values(op) or op in _COPIES


def signatures(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Signature, ...]:
    """What is compared of a call; of an op that computes several gradients, one for each."""
    if op is _aten.convolution_backward.default:
        *rest, wanted = args
        each = [[number == index for number in range(3)] for index in range(3) if wanted[index]]
        return tuple(_signature(op, [*rest, one], kwargs) for one in each)
    return (_signature(op, args, kwargs),)


def of_node(node: fx.Node) -> tuple[Signature, ...]:
    """The same of a node of a stage's graph; nothing of one that is set aside."""
    op, args = node.target, node.args
    if op is run_seeded:
        op, args = args[2], args[3:]
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload) or is_set_aside(op):
        return ()
    return signatures(op, *fx.map_arg((args, dict(node.kwargs)), lambda one: one.meta["val"]))


def _signature(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    packet, overload = str(op).rsplit(".", 1)
    name = f"{packet.removesuffix('_')}.{overload}"
    arguments = op._schema.arguments
    given: dict[str, Any] = {one.name: one.default_value for one in arguments if one.has_default_value()}
    given |= {one.name: value for one, value in zip(arguments, args, strict=False)}
    given |= kwargs
    given.pop("generator", None)
    described = [f"{name}={_describe(value)}" for name, value in given.items()]
    if name in _COMMUTE and given.get("alpha", 1) == 1:
        first, second = sorted(_describe(given.pop(one), strides=False) for one in ("self", "other"))
        described = [first, second, *(f"{name}={_describe(value)}" for name, value in given.items())]
    return name, tuple(described)


def sum_of(tensor: Tensor) -> Signature:
    """The sum of two tensors like this one."""
    return _signature(_aten.add.Tensor, (tensor, tensor), {})


def _describe(value: Any, *, strides: bool = True) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}{_strides(value) if strides else ''}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_describe(one) for one in value)}]"
    return repr(value)


def _strides(tensor: Tensor) -> str:
    """Those of dimensions that have any meaning, if they are not the usual ones."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ""
    return f" strides {[stride if size != 1 else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]}"


def without_strides(signature: Signature) -> Signature:
    """The same whatever the strides of its tensors."""
    name, arguments = signature
    return name, tuple(_STRIDES.sub("", one) for one in arguments)


_STRIDES: Final = re.compile(r" strides \[[^]]*\]")


def shown(signature: Signature) -> str:
    """A signature as text."""
    name, arguments = signature
    return f"{name}({', '.join(arguments)})"
