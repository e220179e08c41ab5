"""Autocast regions of a model, from capture to the graphs of stages, in which the casts are ops.

torch.export makes an autocast region one op, which can't be cut, and loses a ``torch.no_grad`` inside. So during capture we
record the autocasts of each op instead, and enter them whenever the op runs.
"""

# pyright: reportPrivateUsage=false
# An autocast's settings have no public name, nor has the hook that hides its entry from torch.export.

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, takewhile
from operator import attrgetter
from typing import Any, Final

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.traceback import annotate, preserve_node_meta

from adaptra.errors import OptionError

DEVICES: Final = ("cpu", "cuda")
"""The devices that stages run on, for which autocast can be on."""

_REGION: Final = "adaptra_autocast"


@dataclass(frozen=True, slots=True)
class Region:
    """One entered autocast. Its number distinguishes it from others with the same settings."""

    number: int
    device: str
    dtype: torch.dtype
    enabled: bool

    def make(self) -> torch.autocast:
        """Return an autocast with the model's settings, not yet entered."""
        # Tracing turns the cache of casts off. Without the cache, the gradients of a weight used twice are added after the
        # cast.
        return torch.autocast(self.device, self.dtype, self.enabled, cache_enabled=True)


def refuse_autocast(what: str) -> None:
    """Refuse a call under autocast, since other threads and processes would not run under it.

    Raises:
        OptionError: Autocast is on. The text says where to use it.
    """
    if any(map(torch.is_autocast_enabled, DEVICES)):
        raise OptionError(f"{what} under torch.autocast: expected it in the model's forward and in loss=, where it is compiled")


@contextmanager
def without_autocast() -> Generator[None]:
    """Turn autocast off within this context."""
    with ExitStack() as left:
        for device in filter(torch.is_autocast_enabled, DEVICES):
            left.enter_context(torch.autocast(device, enabled=False))
        yield


def enter_autocast_openly(graph: fx.GraphModule) -> None:
    """Let a graph of dynamo enter its autocasts as a model's own code does, which capture records, and not by ops."""
    for function, other in ((_enter_autocast, _enter), (_exit_autocast, _leave)):
        for node in graph.graph.find_nodes(op="call_function", target=function):
            node.target = other
    graph.recompile()


def _enter(*settings: Any) -> torch.autocast:
    entered = torch.autocast(*settings)
    entered.__enter__()
    return entered


def _leave(entered: torch.autocast) -> None:
    entered.__exit__(None, None, None)


@contextmanager
def noting_autocast() -> Generator[None]:
    """Record the autocasts of every op that is captured within this context."""
    numbers = count()
    notes: list[tuple[tuple[Region, ...], AbstractContextManager[None]]] = []
    original: Any = torch.autocast
    before = original.__enter__, original.__exit__

    def enter(autocast: Any) -> Any:
        outer = notes[-1][0] if notes else ()
        regions = (*outer, Region(next(numbers), autocast.device, autocast.fast_dtype, autocast._enabled))
        note = annotate({_REGION: regions})
        note.__enter__()
        notes.append((regions, note))
        with torch._C.DisableTorchFunction():
            return before[0](autocast)

    def leave(autocast: Any, *error: Any) -> Any:
        notes.pop()[1].__exit__(None, None, None)
        with torch._C.DisableTorchFunction():
            return before[1](autocast, *error)

    original.__enter__, original.__exit__ = enter, leave
    try:
        with preserve_node_meta():
            yield
    finally:
        original.__enter__, original.__exit__ = before


@contextmanager
def following_autocast() -> Generator[Callable[[fx.Node], None]]:
    """Yield a function to call before each node runs. It exits and enters autocasts as the model does.

    An autocast stays entered from node to node, since its cache of weights' casts lasts only that long.
    """
    entered: list[tuple[Region, torch.autocast]] = []

    def leave_to(depth: int) -> None:
        while len(entered) > depth:
            entered.pop()[1].__exit__(None, None, None)

    def enter(node: fx.Node) -> None:
        regions = regions_of(node)
        same = sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1], zip(entered, regions, strict=False)))
        leave_to(same)
        for region in regions[same:]:
            entered.append((region, region.make()))
            entered[-1][1].__enter__()

    try:
        yield enter
    finally:
        leave_to(0)


def under_autocast(value: Any) -> Any:
    """Wrap a graph argument of a higher-order op in a function that enters the autocasts of the graph's nodes."""
    if not isinstance(value, fx.GraphModule) or not any(regions_of(node) for node in _calls(value)):
        return value

    def run(*args: Any) -> Any:
        with following_autocast() as enter:
            return _Interpreter(value, enter).run(*args)

    return run


class _Interpreter(fx.Interpreter):
    """Runs a graph node by node, each in its autocasts."""

    def __init__(self, module: fx.GraphModule, enter: Callable[[fx.Node], None]) -> None:
        super().__init__(module)
        self._enter = enter

    def run_node(self, n: fx.Node) -> Any:
        self._enter(n)
        return super().run_node(n)

    def fetch_attr(self, target: str) -> Any:
        return under_autocast(super().fetch_attr(target))


def regions_of(node: fx.Node) -> tuple[Region, ...]:
    """Return the autocasts of a node, outermost first. A higher-order op has those of all nodes in its graphs."""
    held = [attrgetter(str(one.target))(node.graph.owning_module) for one in node.all_input_nodes if one.op == "get_attr"]
    inner = [regions_of(one) for graph in held if isinstance(graph, fx.GraphModule) for one in _calls(graph)]
    shared = tuple(same[0] for same in takewhile(lambda same: len(set(same)) == 1, zip(*inner, strict=False)))
    return node.meta.get("custom", {}).get(_REGION, shared)


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]
