"""Marks: what is compared of a value, and how it is shown to people."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

import torch
from torch import Tensor

from adaptra.graph.ops.specs import dtype_name

_SHOWN: Final = 60
_MOST_CHANGES: Final = 3
_SAME: Final = "the same as "
_PLAIN: Final = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice, enum.Enum, PurePath),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """The mark of one value.

    Attributes:
        text: The value for people. Values without identity are equal if their texts are.
        refers: Returns the object whose identity counts, or None if it is gone; None if the text alone counts.
        is_state: Whether the value is a parameter or buffer.
        is_mode: Whether the value is a module's training flag.
        is_empty: Whether the value is a tensor on the meta device.
    """

    text: str
    refers: Any = None
    is_state: bool = False
    is_mode: bool = False
    is_empty: bool = False

    def is_like(self, other: Mark) -> bool:
        """Return whether this is the mark of the same value.

        A model that is moved to the meta device frees its memory, which the pipeline has no use for.
        """
        if other.is_empty and other.is_state and (self.text == other.text or is_elsewhere(self)):
            return True
        if self.text != other.text or (self.refers is None) is not (other.refers is None):
            return False
        if self.refers is None:
            return True
        mine = self.refers()
        return mine is not None and mine is other.refers()


def is_plain(value: object) -> bool:
    """Return whether a value can't change and is equal to another one if its text is."""
    if isinstance(value, tuple | frozenset):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def same_as(place: str) -> Mark:
    """Return the mark of a value that has another place too, where its content is looked at."""
    return Mark(f"{_SAME}{place or 'the model'}")


def is_elsewhere(mark: Mark) -> bool:
    """Return whether it is a mark of :func:`same_as`."""
    return mark.text.startswith(_SAME)


def mark_of(value: object) -> Mark:
    """Return the mark of a value whose content is not looked at: a plain one by its text, any other one by its identity."""
    if is_plain(value):
        return Mark(repr(value))
    return Mark(_described(value), _reference(value))


def tensor_mark(tensor: Tensor, *, is_state: bool) -> Mark:
    """Return the mark of a tensor: its identity, dtype and whether it requires a gradient."""
    text = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}, requires_grad={tensor.requires_grad}"
    return Mark(text, _reference(tensor), is_state, is_empty=tensor.is_meta)


def differences(before: Mapping[str, Mark], after: Mapping[str, Mark]) -> dict[str, str]:
    """Return what changed, as a text by the place of each change."""
    changes: dict[str, str] = {}
    for place in (*before, *(one for one in after if one not in before)):
        old, new = before.get(place), after.get(place)
        if old is None or new is None:
            changes[place] = "is new" if old is None else "is gone"
        elif not old.is_like(new):
            texts = [one.text if len(one.text) <= _SHOWN else f"{one.text[: _SHOWN - 1]}…" for one in (old, new)]
            changes[place] = "is another object" if texts[0] == texts[1] else f"{texts[0]} → {texts[1]}"
    return changes


def shown(changes: Mapping[str, str]) -> str:
    """Return changes as one line for people: the first few, and the number of the others."""
    lines = [f"{place} {text}" if text.startswith("is ") else f"{place}: {text}" for place, text in changes.items()]
    more = len(lines) - _MOST_CHANGES
    return "; ".join(lines[:_MOST_CHANGES]) + (f"; and {more} more" if more > 0 else "")


def _reference(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _described(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    return str(name) if isinstance(name, str) else f"a {type(value).__qualname__}"
