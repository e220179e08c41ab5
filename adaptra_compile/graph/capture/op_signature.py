"""The signature of an op's call, by which eager torch and stages are compared: its name, its scalars and its tensors' specs.

Details that cost nothing or change no number are ignored: views, results written in place, and the order of two summands.
Views show in the strides of the ops that read them.
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
"""Ops whose result is rounded once, so that neither argument order nor strides matter. Tensors that cross stages are dense."""


def is_set_aside(op: Any) -> bool:
    """Return whether calls of an op are not compared: views, reads, allocations and copies."""
    return is_view(op) or reads_values(op) or op in _COPIES


def signatures(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Signature, ...]:
    """Return the signatures of a call: one, or one per gradient if the op computes several gradients."""
    if op is _aten.convolution_backward.default:
        *rest, wanted = args
        each = [[number == index for number in range(3)] for index in range(3) if wanted[index]]
        return tuple(_signature(op, [*rest, one], kwargs) for one in each)
    return (_signature(op, args, kwargs),)


def of_node(node: fx.Node) -> tuple[Signature, ...]:
    """Return the signatures of a node of a stage's graph; none for an op that is not compared."""
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
    by_name: dict[str, Any] = {one.name: one.default_value for one in arguments if one.has_default_value()}
    by_name |= {one.name: value for one, value in zip(arguments, args, strict=False)}
    by_name |= kwargs
    by_name.pop("generator", None)
    described = [f"{name}={_describe(value)}" for name, value in by_name.items()]
    if name in _COMMUTE and by_name.get("alpha", 1) == 1:
        first, second = sorted(_describe(by_name.pop(one), strides=False) for one in ("self", "other"))
        described = [first, second, *(f"{name}={_describe(value)}" for name, value in by_name.items())]
    return name, tuple(described)


def sum_of(tensor: Tensor) -> Signature:
    """Return the signature of the sum of two tensors like this one."""
    return _signature(_aten.add.Tensor, (tensor, tensor), {})


def _describe(value: Any, *, strides: bool = True) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}{_strides(value) if strides else ''}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_describe(one) for one in value)}]"
    return repr(value)


def _strides(tensor: Tensor) -> str:
    """Return the strides of dimensions longer than 1 as text, or nothing if they are those of a contiguous tensor."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ""
    return f" strides {[stride if size != 1 else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]}"


def without_strides(signature: Signature) -> Signature:
    """Return the signature without the strides of its tensors."""
    name, arguments = signature
    return name, tuple(_STRIDES.sub("", one) for one in arguments)


_STRIDES: Final = re.compile(r" strides \[[^]]*\]")


def shown(signature: Signature) -> str:
    """Return a signature as text."""
    name, arguments = signature
    return f"{name}({', '.join(arguments)})"
