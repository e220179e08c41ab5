"""Activation checkpointing: the nodes to compute again instead of keeping their values, from capture to the backward pass.

``torch.utils.checkpoint`` sets hooks on the tensors that autograd saves. A graph of ops has no such hooks: torch.export keeps
the function's ops but not that they were checkpointed. So during capture we replace the functions behind both forms of
checkpointing by ones that number the regions. The backward pass then computes the values of a region again, on the stage that
first made them.
"""

# pyright: reportPrivateUsage=false
# torch.utils.checkpoint.checkpoint looks up the names below at each call, however a model has imported it.

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils import checkpoint

from adaptra.graph.ops.ops import changed_by, changes_unsaid, is_random, is_view_node

_REGION: Final = "adaptra_checkpoint"

# Since torch 2.15 checkpoint calls the first of these. The second is still there, but replacing it would change nothing.
_WITHOUT_REENTRANCE: Final = next(
    name
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    if hasattr(checkpoint, name)
)


@contextmanager
def numbering_checkpoints() -> Generator[None]:
    """Record the checkpointed region of every op that is captured within this context, for both forms of checkpointing."""
    numbers = count()

    @contextmanager
    def region() -> Generator[None]:
        with annotate({_REGION: next(numbers)}):
            yield

    def without_reentrance(*_: Any, **__: Any) -> Generator[None]:
        with region():
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
            with region():
                return function(*args)

    module: Any = checkpoint
    before = getattr(module, _WITHOUT_REENTRANCE), module.CheckpointFunction
    setattr(module, _WITHOUT_REENTRANCE, without_reentrance)
    module.CheckpointFunction = Reentrant
    try:
        with preserve_node_meta():
            yield
    finally:
        setattr(module, _WITHOUT_REENTRANCE, before[0])
        module.CheckpointFunction = before[1]


def region_of(captured: fx.Node) -> int | None:
    """Return the number of a captured node's checkpointed region, or None."""
    return captured.meta.get("custom", {}).get(_REGION)


def pass_on_region(captured: fx.Node, traced: Iterable[fx.Node]) -> None:
    """Copy the region of a captured node to the nodes traced from it."""
    number = region_of(captured)
    if number is not None:
        for node in traced:
            node.meta[_REGION] = number


def repeatable(forward: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return the nodes of a forward pass that run again for the backward pass: those inside checkpointed regions.

    Three kinds of node are left out, so their values are kept. A region's results are kept, since later regions start from
    them. Random numbers are kept, since a second draw would differ. So are values that are changed in place, and values
    computed from those.
    """
    nodes = dict.fromkeys(forward)
    changed = {_memory(one) for node in nodes for one in changed_by(node)}
    repeated: set[fx.Node] = set()
    for node in nodes:
        number = node.meta.get(_REGION)
        if number is None or any(user.meta.get(_REGION) != number for user in node.users if user in nodes):
            continue
        if is_random(node.target, node.args, node.kwargs) or changes_unsaid(node):
            continue
        source = node.all_input_nodes[0] if node.target is operator.getitem else None
        touches = {_memory(one) for one in (node, *node.all_input_nodes)}
        if not touches & changed and (source is None or source in repeated):
            repeated.add(node)
    return frozenset(repeated)


def _memory(node: fx.Node) -> fx.Node:
    """Return the node that made the memory of which a node's value is a view."""
    while node.op == "call_function" and is_view_node(node):
        node = node.all_input_nodes[0]
    return node
