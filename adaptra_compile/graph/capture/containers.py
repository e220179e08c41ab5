"""Containers of users' batches: opened to nests that torch's pytree walks, and rebuilt for the model and the loss.

Pytree takes what it doesn't know for one leaf, so the tensors within would be constants. Nothing is registered there, since its
registry belongs to the whole process. A dataclass, or a class derived from dict or UserDict, becomes :class:`Opened` instead, a
named tuple, so each user of pytree finds its tensors. What can't be opened is refused, as its values may change unseen.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from adaptra.errors import BatchError

_TENSORS: Final = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)
_PLAIN: Final = frozenset({type(None), bool, int, float, str, Tensor})
_CONSTANTS: Final = (
    *(int, float, complex, str, bytes, range, slice, type(...), Enum, type, FunctionType, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""What can't change in place, so that each step can compare it with the example's."""

_EXPECTED: Final = (
    "expected tensors, in dicts, lists, tuples, named tuples, dataclasses, or classes derived from dict or UserDict"
)

_Lists = list[tuple[str, list[Any]]]
"""Lists of constants, each with the text that says where it is."""


@dataclass(frozen=True, slots=True)
class ContainerType:
    """The class of an opened container, as a leaf; and whether its attributes are its items, as in many AttrDicts."""

    of: type
    is_its_dict: bool = False

    def __repr__(self) -> str:
        return self.of.__qualname__


class Opened(NamedTuple):
    """A container of the user as a node of pytree.

    Attributes:
        opened_type: Its class.
        opened_items: What it holds as a dict.
        opened_attributes: Its fields and other attributes by name.
    """

    opened_type: ContainerType
    opened_items: dict[Any, Any]
    opened_attributes: dict[str, Any]

    def __repr__(self) -> str:
        items = [f"{key!r}: {one!r}" for key, one in self.opened_items.items()]
        return (
            f"{self.opened_type!r}({', '.join([*items, *(f'{key}={one!r}' for key, one in self.opened_attributes.items())])})"
        )


def opened(*parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a batch, each by argument name, with all containers opened. Opened ones stay as they are.

    Raises:
        BatchError: A value is neither a tensor, nor a container of tensors, nor a constant. Or a list of constants has as many
            as there are rows. The text names it and its type.
    """
    lists: _Lists = []
    opened_parts = [{name: _open(one, name, lists) for name, one in part.items()} for part in parts]
    if lists:
        rows = next((one.shape[0] for one in pytree.tree_leaves(opened_parts) if isinstance(one, Tensor) and one.dim()), 0)
        for where, values in lists:
            if len(values) == rows:
                raise BatchError(
                    f"{where} is a list of {rows} values such as {values[0]!r}, as many as the batch has rows, and "
                    "each microbatch would get all of them: expected a tensor, which is split by rows, or a tuple if "
                    "these are no rows"
                )
    return opened_parts


def opened_outputs(outputs: Any) -> Any:
    """Return the model's outputs with all containers opened. Values of other types stay as they are."""
    return _open(outputs, "outputs", None)


def closed(nest: Any) -> Any:
    """Return a nest with each opened container as its own class again, built without a call of its constructor."""
    return pytree.tree_map(_close, nest, is_leaf=lambda one: type(one) is Opened)


def path_text(path: tuple[Any, ...]) -> str:
    """Return a path of pytree as Python would write it for the user's own containers."""
    text, keys = "", list(path)
    while keys:
        key = keys.pop(0)
        match getattr(key, "name", None):
            case "opened_attributes":
                text += f".{keys.pop(0).key}"
            case "opened_items":
                pass
            case "opened_type":
                text += ".__class__"
            case _:
                text += pytree.keystr((key,))
    return text


def _open(value: Any, where: str, lists: _Lists | None) -> Any:
    """Return a value opened. ``lists`` takes the lists of constants; with None nothing is refused."""
    kind = type(value)
    if isinstance(value, Tensor) and lists is not None:
        _check_tensor(value, where)
    if isinstance(value, Tensor) or kind in _PLAIN:
        return value
    if kind is dict:
        return {key: _open(one, f"{where}[{key!r}]", lists) for key, one in value.items()}
    if kind is list and lists is not None and len(value) > 1 and all(type(one) in _PLAIN for one in value):
        lists.append((where, value))
    if kind in (list, tuple):
        return kind(_open(one, f"{where}[{index}]", lists) for index, one in enumerate(value))
    if kind in (Opened, torch.Size) or isinstance(value, _CONSTANTS) or _is_of_numpy(kind, "generic"):
        return value
    return _open_other(value, where, lists)


def _open_other(value: Any, where: str, lists: _Lists | None) -> Any:
    """Return a value opened that is not of Python's own types."""
    if isinstance(value, PackedSequence) and lists is not None:
        raise BatchError(
            f"{where} is a PackedSequence, whose tensors have no rows: expected padded tensors; pack them in forward"
        )
    children, tree = pytree.tree_flatten_with_path(value, is_leaf=lambda one: one is not value)
    if not any(one is value for _, one in children):
        return pytree.tree_unflatten([_open(one, where + path_text(path), lists) for path, one in children], tree)
    is_dataclass = dataclasses.is_dataclass(value)
    if not isinstance(value, nn.Module) and (is_dataclass or isinstance(value, dict | UserDict)):
        items: Any = value.data if isinstance(value, UserDict) else value if isinstance(value, dict) else {}
        held = {key: _open(dict.__getitem__(items, key), f"{where}[{key!r}]", lists) for key in dict.keys(items)}
        its_dict = getattr(value, "__dict__", None) is value
        attributes = {} if its_dict else dict(_attributes(value, where, lists, is_strict=is_dataclass))
        return Opened(ContainerType(type(value), its_dict), held, attributes)
    if lists is not None:
        raise BatchError(_refusal(value, where))
    return value


def _attributes(value: Any, where: str, lists: _Lists | None, *, is_strict: bool) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a container, opened.

    Of a dataclass each counts. Others may keep what made them, such as a tokenizer's encodings. What can't be opened of
    these is left out, so a model that reads it fails.
    """
    fields = [one.name for one in dataclasses.fields(value) if hasattr(value, one.name)] if is_strict else []
    others = [name for name in getattr(value, "__dict__", {}) if name not in fields]
    for name in (*fields, *others):
        is_cache = isinstance(getattr(type(value), name, None), cached_property)  # computed again from the new values
        if is_cache or (name == "data" and isinstance(value, UserDict)):
            continue
        try:
            yield name, _open(getattr(value, name), f"{where}.{name}", lists)
        except BatchError:
            if is_strict:
                raise


def _close(container: Any) -> Any:
    if type(container) is not Opened:
        return container
    of = container.opened_type.of
    items: dict[Any, Any] = closed(container.opened_items)
    base: Any = next((each for each in of.__mro__ if each in (OrderedDict, defaultdict, dict)), object)
    restored = base.__new__(of)
    if base is not object:
        for key, value in items.items():
            base.__setitem__(restored, key, value)
    elif issubclass(of, UserDict):
        object.__setattr__(restored, "data", items)
    if container.opened_type.is_its_dict:
        object.__setattr__(restored, "__dict__", restored)
    for name, value in closed(container.opened_attributes).items():
        object.__setattr__(restored, name, value)  # a frozen dataclass has no other way
    return restored


def _check_tensor(value: Tensor, where: str) -> None:
    kind = type(value)
    if value.is_nested:
        raise BatchError(
            f"{where} is a nested tensor, whose rows have unequal sizes: expected a dense one; torch.nested's "
            "to_padded_tensor makes one"
        )
    if value.layout is not torch.strided:
        raise BatchError(
            f"{where} is a tensor of layout {value.layout}: expected a dense one, as its rows are split; give its to_dense()"
        )
    if value.is_quantized:
        raise BatchError(f"{where} is a quantized tensor: expected a dense one; give its dequantize()")
    if kind is not Tensor and not isinstance(value, _TENSORS[1:]):
        raise BatchError(
            f"{where} is a {_name(kind)}, a class derived from Tensor, whose own rules a graph would leave out: expected a "
            "plain tensor; give its as_subclass(torch.Tensor)"
        )


def _refusal(value: Any, where: str) -> str:
    kind = type(value)
    if _is_of_numpy(kind, "ndarray"):
        return f"{where} is a numpy array: expected tensors; torch.from_numpy makes one of it"
    what = f"{where} is {'an' if _name(kind)[0] in 'aeiouAEIOU' else 'a'} {_name(kind)}"
    if isinstance(value, Iterator) or type(value).__name__.endswith("DataLoader"):
        return f"{what}: expected one batch of it, as in a loop: for batch in loader"
    if isinstance(value, nn.Module):
        return f"{what}: expected tensors; make a module that forward uses a part of the model"
    if isinstance(value, torch.Generator):
        return f"{what}: expected tensors; random ops draw by the seed, step and microbatch without one"
    return f"{what}, whose values could change unseen: {_EXPECTED}"


def _is_of_numpy(kind: type, name: str) -> bool:
    return any(one.__name__ == name and one.__module__ == "numpy" for one in kind.__mro__)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
