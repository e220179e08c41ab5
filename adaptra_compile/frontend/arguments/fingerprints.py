"""Descriptions of arguments that are the same in every process. The ranks of a job compare them first of all.

A loss may reach what differs between healthy ranks: a logger, a device, arguments with a local rank. So modules and loggers
count by name, devices and unknown objects by type. Plain values count by value, and so do those of an object's attributes that
the code names.
"""

from __future__ import annotations

import hashlib
import logging
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

from adaptra.runtime.data_parallel.checksum import checksums

_DEPTH: Final = 4
"""Depth to which a function's own functions and values are described."""

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, Number)
_DEVICE: Final = re.compile(r"(cpu|cuda|xpu|mps|hpu|npu|tpu|xla)(:\d+)?")
_OWN_NAME: Final = re.compile(
    r"_*((global|local|world|node|group|process|data_parallel|dp|ddp|my)_?)?rank|gpu(_id)?|device_id|(local_)?process_index"
    r"|pid|host(name)?",
    re.IGNORECASE,
)
"""Names of values that each rank has for itself."""


def describe_function(function: object) -> str:
    """Describe a function by its name and a hash of its code, its defaults and its enclosed values; ``"None"`` for None.

    Two functions of one name that differ in a constant have different hashes. Global variables count by their names only.
    """
    if function is None:
        return "None"
    number = hashlib.sha256(_text(function, _DEPTH, frozenset()).encode()).hexdigest()[:8]
    return f"{_name(function)} (code {number})"


def describe_model(model: nn.Module | Sequence[nn.Module]) -> str:
    """Describe a model by its class, or those of its stages, and the number of elements of its parameters."""
    modules = [model] if isinstance(model, nn.Module) else list(model)
    count = sum(one.numel() for one in nn.ModuleList(modules).parameters())
    return f"{', '.join(type(one).__qualname__ for one in modules)} ({count:,} parameters)"


def _name(function: object) -> str:
    match function:
        case partial():
            return f"partial of {_name(function.func)}"  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        case MethodType() | FunctionType() | BuiltinFunctionType() | type():
            return f"{function.__module__}.{function.__qualname__}"
        case _:
            kind = type(function)
            return f"{kind.__module__}.{kind.__qualname__}"


def _text(value: object, depth: int, named: frozenset[str]) -> str:  # noqa: PLR0911, PLR0912 - one return for each kind of value
    """Describe a value to a depth. ``named`` are the names in the code that reaches it."""
    match value:
        case Tensor():
            return f"tensor {checksums([value])}"
        case torch.device() | str() if found := _DEVICE.fullmatch(str(value)):
            return f"device {found[1]}"
        case Enum():
            return f"{_name(value)} {value.name}"
        case _ if isinstance(value, _PLAIN):
            return repr(value)
        case ModuleType():
            return f"module {value.__name__}"
        case logging.Logger() | logging.LoggerAdapter():
            return f"logger {value.name}"  # pyright: ignore[reportUnknownMemberType]
        case type() | BuiltinFunctionType():
            return _name(value)
        case _ if depth == 0:
            return type(value).__qualname__
        case CodeType():
            constants = [_text(one, depth - 1, named) for one in value.co_consts]
            return f"code {value.co_code.hex()} {value.co_names} {value.co_freevars} {constants}"
        case FunctionType():
            names = _names_in(value.__code__)
            held = zip(value.__code__.co_freevars, map(_content, value.__closure__ or ()), strict=True)
            defaults = _text([value.__defaults__, value.__kwdefaults__], depth - 1, names)
            return f"{_name(value)} {_text(value.__code__, depth, names)} {defaults} {_fields(held, depth - 1, names)}"
        case MethodType():
            code = getattr(value.__func__, "__code__", None)
            names = named if code is None else _reached(type(value.__self__), _names_in(code))
            return f"{_text(value.__func__, depth, named)} of {_text(value.__self__, depth - 1, names)}"
        case partial():
            parts: list[Any] = [value.func, value.args, value.keywords]  # pyright: ignore[reportUnknownMemberType]
            return f"partial {_text(parts, depth, named)}"
        case Mapping():
            return _fields(((str(key), one) for key, one in value.items()), depth - 1, named)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case Sequence():
            return str([_text(one, depth - 1, named) for one in value])  # pyright: ignore[reportUnknownVariableType]
        case Set():
            return str(sorted(_text(one, depth - 1, named) for one in value))  # pyright: ignore[reportUnknownVariableType]
        case _:
            return _object_text(value, depth, named)


def _object_text(value: object, depth: int, named: frozenset[str]) -> str:
    """Describe a module or another callable by all of its attributes, any other object by those that the code names.

    The numbers in what only holds values, such as arguments of argparse, count even if a function elsewhere names them.
    """
    if callable(getattr(value, "tobytes", None)):  # an array
        array: Any = value
        return f"array {array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
    held: dict[str, object] = getattr(value, "__dict__", {})
    code = getattr(type(value), "forward" if isinstance(value, nn.Module) else "__call__", None)
    if isinstance(code, FunctionType):
        names = named | _reached(type(value), _names_in(code.__code__))
        kept = ((name, one) for name, one in held.items() if not name.endswith("_hooks"))
        return f"{_name(value)} {_fields(kept, depth, names)} {_text(code, depth - 1, names)}"
    holds_values = isinstance(value, (Namespace, SimpleNamespace)) or is_dataclass(value)
    kept = ((name, held[name]) for name in sorted(held) if name in named or (holds_values and isinstance(held[name], Number)))
    return f"{_name(value)} {_fields(kept, depth, named)}"


def _fields(fields: Iterable[tuple[str, object]], depth: int, named: frozenset[str]) -> str:
    """Describe values that have names, without those that each rank has for itself."""
    return str([(name, _text(one, depth, named)) for name, one in fields if not _is_own(name)])


def _is_own(name: str) -> bool:
    return _OWN_NAME.fullmatch(name) is not None


def _names_in(code: CodeType) -> frozenset[str]:
    """Return the names of attributes and globals in a function's code, that of its inner functions included."""
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(code.co_names).union(*inner)


def _reached(kind: type, names: frozenset[str]) -> frozenset[str]:
    """Return names with those in the methods of a class that they reach."""
    while True:
        members = [getattr(kind, name, None) for name in names]
        functions = [one.fget if isinstance(one, property) else one for one in members]
        more = names.union(*(_names_in(one.__code__) for one in functions if isinstance(one, FunctionType)))
        if more == names:
            return names
        names = more


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not set yet
        return None
