"""Activation checkpointing: which nodes the user wants computed again instead of kept, from capture to the backward pass.

``torch.utils.checkpoint`` works by hooks on what autograd saves, and a graph of ops has no place for them: torch.export takes
the function's ops and forgets that they were checkpointed. So while a model is captured, what both of its forms call is
replaced by something that numbers the regions. Later the numbers say which values of the forward pass are not kept but made
again where the backward pass needs them, on the stage where they were made first.
"""

# pyright: reportPrivateUsage=false
# The two names below are what torch.utils.checkpoint.checkpoint looks up when it is called, however a model has imported it.

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


@contextmanager
def numbering_checkpoints() -> Generator[None]:
    """Within this context what is checkpointed, in either form, is captured as ops that know their region."""
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
    before = module._checkpoint_without_reentrant_generator, module.CheckpointFunction
    module._checkpoint_without_reentrant_generator, module.CheckpointFunction = without_reentrance, Reentrant
    try:
        with preserve_node_meta():
            yield
    finally:
        module._checkpoint_without_reentrant_generator, module.CheckpointFunction = before


def region_of(captured: fx.Node) -> int | None:
    """The number of the checkpointed region that a captured node lies in, if it does."""
    return captured.meta.get("custom", {}).get(_REGION)


def pass_on_region(captured: fx.Node, traced: Iterable[fx.Node]) -> None:
    """Let the nodes that a captured node has become know its region."""
    number = region_of(captured)
    if number is not None:
        for node in traced:
            node.meta[_REGION] = number


def repeatable(forward: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The nodes of a forward pass that are to be made again for the backward pass: those inside checkpointed regions.

    Left out, and so kept, are what a region hands on to the nodes behind it, which a later region starts from; random numbers,
    which would be others; and whatever is changed in place, or reads what is, which would come out different the second time.
    """
    nodes = dict.fromkeys(forward)
    changed = {_memory(one) for node in nodes for one in changed_by(node)}
    found: set[fx.Node] = set()
    for node in nodes:
        number = node.meta.get(_REGION)
        if number is None or any(user.meta.get(_REGION) != number for user in node.users if user in nodes):
            continue
        if is_random(node.target, node.args, node.kwargs) or changes_unsaid(node.target):
            continue
        source = node.all_input_nodes[0] if node.target is operator.getitem else None
        touches = {_memory(one) for one in (node, *node.all_input_nodes)}
        if not touches & changed and (source is None or source in found):
            found.add(node)
    return frozenset(found)


def _memory(node: fx.Node) -> fx.Node:
    """The node that made the memory which a node's value is a view of."""
    while node.op == "call_function" and is_view_node(node):
        node = node.all_input_nodes[0]
    return node
