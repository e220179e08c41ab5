"""The places where a model's code can keep state: attributes of modules and objects, containers, cells, globals, classes."""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import sys
import sysconfig
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

Content = dict[Any, Any]
"""The values that a place holds, by key."""

MISSING: Final = object()
"""Instead of the value of a key that a place does not hold."""

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_LONG: Final = 4096
"""Longer containers of plain values, such as vocabularies, count by their length."""

HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")
_OF_TORCH: Final = (
    frozenset(vars(nn.Module())) | {"_initialize_hook", "_load_hook", "_flat_weights", "_flat_weight_refs"}
).difference([*HOOKS, "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"])


@dataclass(frozen=True, slots=True)
class Keeper:
    """A place that keeps state.

    Attributes:
        owner: The object whose content it is. It is kept alive, so that no other object gets its identity.
        where: The module, or the loss function, from which the place was reached.
        name: The place in the words of the user's code, such as ``self.cache``.
        read, write: Return a shallow copy of its content; put back such a copy.
        within: Whether a key is an attribute, an item or a name of its own.
    """

    owner: Any
    where: str
    name: str
    read: Callable[[], Content]
    write: Callable[[Content], None]
    within: str = "{}[{!r}]"

    def named(self, key: Any) -> str:
        """Return one value of the place in the words of the user's code."""
        return self.within.format(self.name, key)


def is_plain(value: Any) -> bool:
    """Return whether a value can't change and is compared by itself."""
    return isinstance(value, _PLAIN)


def same(value: Any, other: Any) -> bool:
    """Return whether two values of a key are the same: one object, or equal plain values."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, tuple):
        return len(value) == len(other) and all(map(same, value, other))
    return is_plain(value) and (value == other or repr(value) == repr(other) == "nan")


def alike(value: Any, other: Any, depth: int = 6) -> bool:
    """Return whether two values differ in tensors and in identities only."""
    if same(value, other) or depth == 0:
        return True
    if isinstance(value, Tensor) or type(value) is not type(other) or is_plain(value):
        return isinstance(value, Tensor) and isinstance(other, Tensor)
    if isinstance(value, dict):
        return list(value) == list(other) and all(alike(value[key], other[key], depth - 1) for key in value)
    if isinstance(value, list | tuple | deque):
        return len(value) == len(other) and all(
            alike(first, second, depth - 1) for first, second in zip(value, other, strict=True)
        )
    if isinstance(value, set | frozenset):
        return len(value) == len(other)
    return not hasattr(value, "__dict__") or alike(vars(value), vars(other), depth - 1)


def keeper_of(value: Any, where: str, name: str, settled: frozenset[str] = frozenset()) -> Keeper | None:
    """Return the place that an object is, or None if it keeps nothing.

    Args:
        value: The object.
        where, name: See :class:`Keeper`.
        settled: Names of a module's buffers that have values. A capture follows these.
    """
    if isinstance(value, nn.Module):
        return _of_module(value, where, name, settled)
    if isinstance(value, dict | list | deque | set):
        taken: Callable[[Any], Content] = (
            _items if isinstance(value, dict) else _elements if isinstance(value, set) else _numbered
        )
        return Keeper(value, where, name, functools.partial(_short, value, taken), functools.partial(_refill, value))
    if _is_array(value):
        return Keeper(value, where, name, lambda: {...: value.tobytes()}, functools.partial(_fill_array, value), "{0}")
    if isinstance(value, Iterator):
        return Keeper(value, where, name, lambda: {...: _progress(value)}, lambda content: None, "{0}")
    if is_object(value):
        return Keeper(value, where, name, lambda: dict(vars(value)), functools.partial(_put_attributes, value), "{0}.{1}")
    return None


def cells_of(function: FunctionType, where: str) -> Keeper:
    """Return the variables that a function closes over, as a place."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def read() -> Content:
        contents: Content = {}
        for name, cell in cells.items():
            try:
                contents[name] = cell.cell_contents
            except ValueError:  # not yet assigned
                continue
        return contents

    def write(content: Content) -> None:
        for name, value in content.items():
            cells[name].cell_contents = value

    return Keeper(function, where, f"{function.__qualname__}'s variable", read, write, "{0} {1!r}")


def globals_of(function: FunctionType, where: str) -> Keeper:
    """Return the variables of its module that a function's code names, as a place."""
    space = function.__globals__
    names = [name for name in dict.fromkeys(_names(function.__code__)) if name in space]

    def read() -> Content:
        return {name: space[name] for name in names if name in space and not isinstance(space[name], ModuleType)}

    def write(content: Content) -> None:
        space.update(content)

    return Keeper(function.__code__, where, "the global", read, write, "{0} {1!r}")


def class_of(kind: type, where: str) -> Keeper:
    """Return the attributes of a class that hold values, as a place."""

    def read() -> Content:
        return {
            name: value
            for name, value in vars(kind).items()
            if not name.startswith("__") and (is_plain(value) or isinstance(value, Tensor | list | dict | set | tuple))
        }

    def write(content: Content) -> None:
        for name in read().keys() - content.keys():
            delattr(kind, name)
        for name, value in content.items():
            setattr(kind, name, value)

    return Keeper(kind, where, kind.__qualname__, read, write, "{0}.{1}")


def is_object(value: Any) -> bool:
    """Return whether a value is an instance of a user's class, or of a plain holder of values of the standard library."""
    kind: type = type(value)
    if isinstance(value, type | ModuleType | FunctionType | Tensor) or not hasattr(value, "__dict__"):
        return False
    return not is_library(kind.__module__) or kind.__module__ in ("types", "argparse", "functools", "collections")


def is_library(module: str) -> bool:
    """Return whether a module of this name is torch's, the standard library's or numpy's."""
    top = module.partition(".")[0]
    return top in ("torch", "numpy") or (top in sys.stdlib_module_names and top != "__main__")


def functions_of(value: Any) -> Generator[FunctionType]:
    """Yield the functions of users that a callable runs."""
    match value:
        case FunctionType():
            if not (is_library(value.__module__ or "") or is_installed(value.__code__.co_filename)):
                yield value
        case MethodType():
            yield from functions_of(value.__func__)
        case functools.partial():
            yield from functions_of(value.func)
        case _:
            for kind in type(value).__mro__:
                if callable(value) and not is_library(kind.__module__):
                    yield from (one for one in map(_function, vars(kind).values()) if one is not None)


def _function(value: Any) -> FunctionType | None:
    inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    inner = inner.fget if isinstance(inner, property) else inner
    return inner if isinstance(inner, FunctionType) and not is_installed(inner.__code__.co_filename) else None


@functools.cache
def is_installed(file: str) -> bool:
    """Return whether a file is of an installed package. Its globals are its own affair, such as what it sets up once."""
    folders = sysconfig.get_paths()
    return any(Path(folders[kind]) in Path(file).parents for kind in ("purelib", "platlib"))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _of_module(module: nn.Module, where: str, name: str, settled: frozenset[str]) -> Keeper:
    buffers: dict[str, Any] = vars(module)["_buffers"]

    def read() -> Content:
        attributes = {key: value for key, value in vars(module).items() if key not in _OF_TORCH}
        return attributes | {key: value for key, value in buffers.items() if key not in settled}

    def write(content: Content) -> None:
        for key in read().keys() - content.keys():
            vars(module).pop(key, None)
            buffers.pop(key, None)
        for key, value in content.items():
            (buffers if key in buffers else vars(module))[key] = value

    return Keeper(module, where, name, read, write, "{0}.{1}")


def _short(value: Any, read: Callable[[Any], Content]) -> Content:
    return read(value) if len(value) <= _LONG else {...: len(value)}


def _items(value: dict[Any, Any]) -> Content:
    # The user's class may do anything when it is asked for an item.
    return {key: dict.__getitem__(value, key) for key in dict.keys(value)}


def _numbered(value: list[Any]) -> Content:
    return dict(enumerate(value))


def _elements(value: set[Any]) -> Content:
    return {one: one for one in value}


def _refill(value: Any, content: Content) -> None:
    if ... in content:
        return
    if isinstance(value, dict):
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        kind.clear(value)
        for key, one in content.items():
            kind.__setitem__(value, key, one)
        return
    value.clear()
    if isinstance(value, set):
        value.update(content)
    else:
        value.extend(content.values())


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.nbytes <= 1 << 16 and not value.dtype.hasobject


def _fill_array(value: Any, content: Content) -> None:
    numpy: Any = sys.modules["numpy"]
    value[...] = numpy.frombuffer(content[...], value.dtype).reshape(value.shape)


def _progress(value: Any) -> Any:
    """Return how far an iterator is, as far as it says."""
    if isinstance(value, GeneratorType):
        frame: Any = value.gi_frame
        if frame is None:
            return None
        held = [one for one in gc.get_referents(value) if isinstance(one, Iterator)]
        return (frame.f_lasti, *(one for one in frame.f_locals.values() if is_plain(one)), *map(_progress, held))
    return repr(value) if isinstance(value, itertools.count) else operator.length_hint(value, -1)


def _put_attributes(value: Any, content: Content) -> None:
    vars(value).clear()
    vars(value).update(content)
