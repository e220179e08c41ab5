"""Statements of fields about the ranks: whether all of them must be given the same value, and the text that they compare.

Each field of the options and of ``compile``'s arguments has one of the three statements as its ``metadata``. The values that
the ranks compare at launch are derived from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, Final, cast

_NAME: Final = "on all ranks"
_MOST_CHARACTERS: Final = 100
_SHOWN_CHARACTERS: Final = 60


@dataclass(frozen=True, slots=True)
class _Agreed:
    describe: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class _PerRank:
    reason: str


@dataclass(frozen=True, slots=True)
class _EachField:
    pass


def describe_value(value: object) -> str:
    """Describe a value by a short text that is the same in every process for equal values.

    A long text, such as that of a program, is cut and followed by a hash of all of it.
    """
    match value:
        case str():
            text = value
        case Mapping():
            text = str(dict(cast("Mapping[object, object]", value)))
        case Sequence():
            text = str(list(cast("Sequence[object]", value)))
        case _:
            text = str(value)
    if len(text) <= _MOST_CHARACTERS and "\n" not in text:
        return text
    start = " ".join(text.split())[:_SHOWN_CHARACTERS]
    return f"{start}… (hash {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def agreed(describe: Callable[[Any], str] = describe_value) -> Mapping[str, object]:
    """Return the metadata of a field that must be equal on all ranks. They compare the text that ``describe`` returns."""
    return {_NAME: _Agreed(describe)}


def per_rank(reason: str) -> Mapping[str, object]:
    """Return the metadata of a field that may differ between ranks, with the reason why that is safe."""
    return {_NAME: _PerRank(reason)}


def each_field() -> Mapping[str, object]:
    """Return the metadata of a field whose value is a dataclass, each field of which has its own statement."""
    return {_NAME: _EachField()}


def has_statement(one: Field[Any]) -> bool:
    """Return True if a field says whether it must be equal on all ranks."""
    return _NAME in one.metadata


def agreed_values(options: Any, prefix: str = "") -> dict[str, str]:
    """Return the values that must be equal on all ranks, as texts by field name.

    Args:
        options: A dataclass instance whose fields have statements.
        prefix: The beginning of every name.
    """
    return dict(_agreed_values(options, prefix))


def _agreed_values(options: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for field in fields(options):
        value = getattr(options, field.name)
        match field.metadata[_NAME]:
            case _Agreed(describe):
                yield prefix + field.name, describe(value)
            case _EachField():
                yield from _agreed_values(value, f"{prefix}{field.name}.")
            case _:
                continue
