"""Checks of values that a user or another rank gives: what they are, and the errors for options that share a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar, cast

from adaptra.errors import OptionError

T = TypeVar("T")


def is_whole(given: object) -> TypeGuard[int]:
    """Return True if this is a whole number; True and False are none."""
    return isinstance(given, int) and not isinstance(given, bool)


def is_real(given: object) -> TypeGuard[int | float]:
    """Return True if this is a number, which may be infinite or nan; True and False are none."""
    return isinstance(given, int | float) and not isinstance(given, bool)


def is_finite(value: object) -> TypeGuard[int | float]:
    """Return True if this is a finite number that a float can hold."""
    try:
        return is_real(value) and math.isfinite(value)
    except OverflowError:
        return False


def is_list_of(kind: type[T], value: object) -> TypeGuard[Sequence[T]]:
    """Return True if this is a sequence of values of this class; a string is none."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(one, kind) for one in cast("Sequence[object]", value))


def are_edges(value: object) -> bool:
    """Return True if this is a sequence of directed edges of neighbouring stages, such as ``[(1, 2)]``."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    for edge in cast("Sequence[object]", value):
        match edge:
            case (int(source), int(destination)) if source >= 0 <= destination and abs(source - destination) == 1:
                continue
            case _:
                return False
    return True


def nearest_multiple(given: int, unit: int) -> int:
    """Return the multiple of ``unit`` that a text suggests in place of a number: the nearest one, at least ``unit`` itself."""
    return max(1, round(given / unit)) * unit


def require_flag(name: str, value: object) -> None:
    """Refuse an option that is not True or False.

    Raises:
        OptionError: The option is refused. The text names it and its value.
    """
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r}: expected True or False")


def require_count(name: str, value: object) -> None:
    """Refuse an option that is not a whole number of at least 1.

    Raises:
        OptionError: The option is refused. The text names it and its value.
    """
    if not is_whole(value) or value < 1:
        raise OptionError(f"{name}={value!r}: expected a whole number of at least 1")


def require_seconds(name: str, value: object) -> None:
    """Refuse an option that is not a finite number of seconds above 0.

    Raises:
        OptionError: The option is refused. The text names it and its value.
    """
    if not is_finite(value) or value <= 0:
        raise OptionError(f"{name}={value!r}: expected a number of seconds above 0")


def require_word(name: str, value: Any, words: Sequence[str]) -> None:
    """Refuse an option that is none of these words.

    Raises:
        OptionError: The option is refused. The text names it, its value and the words.
    """
    if value not in words:
        *others, last = map(repr, words)
        raise OptionError(f"{name}={value!r}: expected {', '.join(others)} or {last}")


def require_call(name: str, value: object, argument: str) -> None:
    """Refuse an option that is neither a function nor None. ``argument`` says what the function is called with.

    Raises:
        OptionError: The option is refused. The text names it and its value.
    """
    if value is not None and not callable(value):
        raise OptionError(f"{name}={value!r}: expected a function that is called with each {argument}, or None")
