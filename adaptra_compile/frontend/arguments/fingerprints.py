"""Descriptions of arguments that are the same in every process. The ranks of a job compare them first of all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from adaptra.runtime.state.checksum import checksums

_DEPTH: Final = 4
"""Depth to which a function's own functions and values are described."""

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def describe_function(function: object) -> str:
    """Describe a function by its name and a hash of its code, its defaults and its enclosed values; ``"None"`` for None.

    Two functions of one name that differ in a constant have different hashes. Global variables count by their names only.
    """
    if function is None:
        return "None"
    number = hashlib.sha256(_text(function, _DEPTH).encode()).hexdigest()[:8]
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
        case MethodType() | FunctionType() | BuiltinFunctionType():
            return f"{function.__module__}.{function.__qualname__}"
        case _:
            kind = type(function)
            return f"{kind.__module__}.{kind.__qualname__}"


def _text(value: object, depth: int) -> str:  # noqa: PLR0911 - one return for each kind of value
    match value:
        case Tensor():
            return f"tensor {checksums([value])}"
        case _ if isinstance(value, _PLAIN):
            return repr(value)
        case _ if depth == 0:
            return type(value).__qualname__
        case CodeType():
            constants = [_text(one, depth - 1) for one in value.co_consts]
            return f"code {value.co_code.hex()} {value.co_names} {value.co_freevars} {constants}"
        case FunctionType():
            cells = [_text(_content(cell), depth - 1) for cell in value.__closure__ or ()]
            defaults = _text([value.__defaults__, value.__kwdefaults__], depth - 1)
            return f"{_name(value)} {_text(value.__code__, depth)} {defaults} {cells}"
        case MethodType():
            return f"{_text(value.__func__, depth)} of {_text(value.__self__, depth - 1)}"
        case partial():
            parts: list[Any] = [value.func, value.args, value.keywords]  # pyright: ignore[reportUnknownMemberType]
            return f"partial {_text(parts, depth)}"
        case Mapping():
            return str([(str(key), _text(one, depth - 1)) for key, one in value.items()])  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case Sequence():
            return str([_text(one, depth - 1) for one in value])  # pyright: ignore[reportUnknownVariableType]
        case Set():
            return str(sorted(_text(one, depth - 1) for one in value))  # pyright: ignore[reportUnknownVariableType]
        case BuiltinFunctionType():
            return _name(value)
        case _:
            held = {name: one for name, one in getattr(value, "__dict__", {}).items() if not name.endswith("_hooks")}
            code = getattr(type(value), "forward" if isinstance(value, nn.Module) else "__call__", None)
            called = _text(code, depth - 1) if isinstance(code, FunctionType) else ""
            return f"{_name(value)} {_text(held, depth)} {called}"


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not set yet
        return None
