"""Execution of graph nodes on fake tensors: shapes, strides, dtypes and autograd, but no numbers and no memory."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from adaptra.graph.ops.autocast import under_autocast
from adaptra.graph.ops.fake_ops import describe_more_ops
from adaptra.graph.ops.ops import call

describe_more_ops()


def fake_mode() -> FakeTensorMode:
    """Return a fake mode that refuses real tensors."""
    return FakeTensorMode(allow_non_fake_inputs=False)


def fake_like(tensor: Tensor, requires_grad: bool = False) -> Tensor:
    """Return a new fake tensor of the same shape, strides, dtype and device. Call this inside a fake mode."""
    made = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(requires_grad)


def run_node(module: fx.GraphModule, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Execute one ``call_function`` node."""

    def look_up(argument: fx.Node) -> Any:
        if argument.op == "get_attr":
            return under_autocast(attrgetter(str(argument.target))(module))
        return values[argument]

    return call(node, fx.map_arg(node.args, look_up), fx.map_arg(node.kwargs, look_up))


@contextmanager
def without_onednn() -> Generator[None]:
    """Let composite ops use torch's own kernels instead of oneDNN's within this context."""
    # Not torch's context of that name, which also sets switches of other devices and warns of them.
    switches: Any = torch.backends.mkldnn
    before = switches.enabled
    switches.enabled = False
    try:
        yield
    finally:
        switches.enabled = before
