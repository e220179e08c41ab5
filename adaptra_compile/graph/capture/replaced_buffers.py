"""Buffers that a model's code replaces by new tensors: the new values become those of the next call.

Torch.export sees this for the outermost module's buffers only, and would leave all others as they were. Buffers that the code
reads as numbers are refused.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]  # what all kinds have in common

from adaptra.errors import CaptureError


@contextmanager
def following_replaced_buffers(model: nn.Module) -> Generator[None]:
    """Copy, on exit, the new values of buffers that were replaced in this context into the tensors from before.

    Raises:
        CaptureError: A new tensor has another shape or dtype. The text names the buffer.
    """
    before = [
        (f"{name}.{key}" if name else key, module, key, buffer)
        for name, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
    ]
    yield
    for name, module, key, buffer in before:
        held: dict[str, Any] = vars(module)["_buffers"]
        new = held.get(key)
        if new is buffer:
            continue
        if not isinstance(new, Tensor) or new.shape != buffer.shape or new.dtype != buffer.dtype:
            shown = f"{new.dtype} of shape {tuple(new.shape)}" if isinstance(new, Tensor) else repr(new)
            raise CaptureError(
                f"{name}: the model's code replaces this buffer, of {buffer.dtype} and shape {tuple(buffer.shape)}, by one of "
                f"{shown}: expected the same shape and dtype, so that a stage can keep it"
            )
        buffer.copy_(new.detach())
        held[key] = buffer


def refuse_cumulative_averages(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse a BatchNorm in training mode whose statistics are averages over all batches so far.

    Raises:
        CaptureError: There is one. The text names the module.
    """
    for name, module in named:
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats and module.momentum is None:
            raise CaptureError(
                f"module {name or '(the model itself)'} ({type(module).__name__}): momentum=None weights each batch by the "
                "number of batches so far, which a graph can't read: expected a number, such as momentum=0.1; or give the "
                "model as a list of stages, which runs any code"
            )


def read_before_replaced(graph: fx.Graph, state: Iterable[fx.Node]) -> None:
    """Let ops that read a buffer, which is replaced at the end of the graph, read a copy, since the backward pass may need it.

    Args:
        graph: The graph. It is changed.
        state: Its placeholders of parameters and buffers.
    """
    for node in state:
        last = [
            one for one in node.users if one.target is torch.ops.aten.copy_.default and one.args[0] is node and not one.users
        ]
        others = [one for one in node.users if one not in last]
        if len(last) != 1 or not others or any(one.next.op == "call_function" and not _copies(one.next) for one in last):
            continue
        with graph.inserting_before(min(others)):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {**min(others).meta, "val": node.meta.get("val")}
        for one in others:
            one.replace_input_with(node, copy)


def _copies(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.copy_.default and not node.users
