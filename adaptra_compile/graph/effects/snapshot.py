"""Snapshots of all that a model's code can keep: what it changed is found, named and put back."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Final

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from adaptra.graph.effects.generators import global_generators, is_at, is_generator, restore, state_of
from adaptra.graph.effects.keepers import (
    MISSING,
    Content,
    Keeper,
    cells_of,
    class_of,
    functions_of,
    globals_of,
    is_installed,
    is_library,
    is_plain,
    keeper_of,
    same,
)
from adaptra.graph.ops.ops import memory_of

_MOST: Final = 5_000
"""So many places are looked at, the nearest first. A loss may reach all of a user's program."""


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """One value that a model's code has changed.

    Attributes:
        keeper, key: Where.
        before, after: The value, or MISSING.
    """

    keeper: Keeper
    key: Any
    before: Any
    after: Any

    @property
    def name(self) -> str:
        """The value in the words of the user's code; of a container that grows, the container."""
        return self.keeper.name if self.grows else self.keeper.named(self.key)

    @property
    def grows(self) -> bool:
        """Whether it is an item that a container has not always."""
        return "[" in self.keeper.within and MISSING in (self.before, self.after)


class Snapshot:
    """The state that a model and a loss function can keep, at one time, without parameters and without buffers with values.

    Args:
        model: The model.
        loss: The loss function, if any.
        like: An earlier snapshot, of whose places none is left out. The states of generators are then not looked at.
    """

    def __init__(self, model: nn.Module, loss: Any = None, like: Snapshot | None = None) -> None:
        self.settled: dict[int, frozenset[str]] = {} if like is None else like.settled
        self.contents: dict[int, tuple[Keeper, Content]] = {}
        self.tensors: dict[int, tuple[Tensor, str]] = {}
        self.generators: dict[int, tuple[Any, str, Any]] = {}
        self._with_generators = like is None
        for name, generator in global_generators().items():
            self._keep_generator(generator, name)
        self._queue: deque[tuple[Any, str, str]] = deque()
        roots = {id(module): (module, name) for name, module in model.named_modules()}
        for module, name in roots.values():
            self._queue.append((module, f"module {name or '(the model itself)'} ({type(module).__name__})", "self"))
        if loss is not None:
            self._queue.append((loss, "the loss function", getattr(loss, "__qualname__", "loss")))
        self._walk()
        for identity, (keeper, _) in () if like is None else like.contents.items():
            self.contents.setdefault(identity, (keeper, keeper.read()))

    def changes(self, later: Snapshot) -> list[ChangedValue]:
        """Return the values of this snapshot's places that differ in a later one."""
        changes: list[ChangedValue] = []
        for identity, (keeper, before) in self.contents.items():
            after = later.contents[identity][1]
            if after is before:
                continue
            for key in [*before, *(key for key in after if key not in before)]:
                one, other = before.get(key, MISSING), after.get(key, MISSING)
                if not same(one, other):
                    changes.append(ChangedValue(keeper, key, one, other))
        return changes

    def restore(self) -> None:
        """Put back all values and states as they were. What has not changed is not touched."""
        for keeper, content in self.contents.values():
            now = keeper.read()
            if now.keys() != content.keys() or not all(same(now[key], content[key]) for key in now):
                keeper.write(content)
        for generator, _, state in self.generators.values():
            if not is_at(generator, state):
                restore(generator, state)

    def drawn(self) -> list[tuple[Any, str, Any]]:
        """Return the generators whose state is not that of this snapshot: each with its name and its state then."""
        return [(one, name, state) for one, name, state in self.generators.values() if not is_at(one, state)]

    def plain_tensors(self, model: nn.Module, loss: Any) -> Mapping[int, str]:
        """Return the memory of tensors that are neither parameters nor buffers, each with its name."""
        state = [*model.parameters(), *model.buffers()]
        if isinstance(loss, nn.Module):
            state += [*loss.parameters(), *loss.buffers()]
        own = {memory_of(tensor) for tensor in state}
        found = ((tensor, name) for tensor, name in self.tensors.values() if not isinstance(tensor, FakeTensor))
        return {memory_of(tensor): name for tensor, name in found if memory_of(tensor) not in own}

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor; None if it is not among those that were found."""
        return self.tensors[id(tensor)][1] if id(tensor) in self.tensors else None

    def _walk(self) -> None:
        while self._queue and len(self.contents) < _MOST:
            value, where, name = self._queue.popleft()
            for keeper in self._keepers(value, where, name):
                if id(keeper.owner) in self.contents:
                    continue
                content = keeper.read()
                self.contents[id(keeper.owner)] = keeper, content
                for key, inner in content.items():
                    if not is_plain(inner):
                        self._queue.append((inner, where, keeper.named(key)))

    def _keepers(self, value: Any, where: str, name: str) -> Iterator[Keeper]:
        if isinstance(value, Tensor):
            self.tensors.setdefault(id(value), (value, f"{where}: {name}"))
            return
        if is_generator(value):
            self._keep_generator(value, f"{where}: {name}")
            return
        for inner in _parts(value):
            self._queue.append((inner, where, name))
        if isinstance(value, nn.Module):
            buffers: Mapping[str, Any] = vars(value)["_buffers"]
            settled = self.settled.setdefault(id(value), frozenset(key for key, one in buffers.items() if one is not None))
            own = keeper_of(value, where, name, settled)
            if id(value) not in self.contents:  # a layer that is not registered has parameters of its own
                inside: Mapping[str, Any] = vars(value)["_modules"] | vars(value)["_parameters"]
                self._queue.extend((one, where, f"{name}.{key}") for key, one in inside.items() if one is not None)
        else:
            own = keeper_of(value, where, name)
        if own is not None:
            yield own
        for function in functions_of(value):
            if id(function) not in self.contents:
                yield globals_of(function, where)
                yield cells_of(function, where)
        for kind in type(value).__mro__ if isinstance(value, nn.Module) else ():
            module: Any = sys.modules.get(kind.__module__)
            if not is_library(kind.__module__) and not is_installed(getattr(module, "__file__", None) or ""):
                yield class_of(kind, where)

    def _keep_generator(self, generator: Any, name: str) -> None:
        if self._with_generators and id(generator) not in self.generators:
            self.generators[id(generator)] = generator, name, state_of(generator)


@contextmanager
def kept(model: nn.Module, loss: Any = None) -> Generator[Snapshot]:
    """Put back, on exit, all that a model's code has changed in this context but parameters and buffers."""
    before = Snapshot(model, loss)
    try:
        yield before
    finally:
        before.restore()


def _parts(value: Any) -> Iterator[Any]:
    """Yield the objects that a callable holds besides its attributes."""
    if isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.args, value.keywords)
    elif isinstance(value, FunctionType):
        yield from value.__defaults__ or ()
    elif isinstance(value, tuple):
        yield from value
