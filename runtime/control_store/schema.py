"""Control data from other ranks, checked field by field before use.

Data from a store are text of bounded size that must be JSON. A :class:`Fields` reads one JSON object: each field by name with
its type and range. :meth:`Fields.end` refuses unknown fields. Nothing is ever unpickled or executed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, cast

from adaptra.checks import is_finite, is_whole
from adaptra.errors import ControlError

MAX_BYTES: Final = 64 * 1024 * 1024
"""The longest control message that is read. The plan of 64 stages and 512 microbatches is about 1 MB."""


def encode(data: dict[str, Any]) -> str:
    """Return a JSON object as text to be sent.

    Raises:
        ControlError: The text would be longer than :data:`MAX_BYTES`.
        ValueError: A number is not finite.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_BYTES:
        raise ControlError(f"control message of {len(text)} bytes: expected at most {MAX_BYTES}")
    return text


def decode(payload: bytes, where: str) -> Fields:
    """Read a JSON object that was sent.

    Raises:
        ControlError: It is too long, not JSON or not an object.
    """
    if len(payload) > MAX_BYTES:
        raise ControlError(f"{where}: {len(payload)} bytes: expected at most {MAX_BYTES}")
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ControlError(f"{where}: not JSON: {error}") from None
    return Fields(data, where)


def decode_all(texts: Sequence[str], what: str) -> list[Fields]:
    """Read the JSON object that each rank told, by rank. Errors are those of :func:`decode`, and begin with ``what`` it is."""
    return [decode(text.encode(), f"{what} of rank {rank}") for rank, text in enumerate(texts)]


class Fields:
    """The fields of one JSON object.

    Args:
        data: The decoded object.
        where: The beginning of every error message, such as ``measurement of rank 2``.

    Raises:
        ControlError: ``data`` is not an object; every method raises it for a field that is missing or not as expected.
    """

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise ControlError(f"{where}: expected a JSON object, got {type(data).__name__}")
        self._left = dict(cast("dict[str, object]", data))
        self._where = where

    def whole(self, name: str, at_least: int = 0) -> int:
        """Read a whole number."""
        value = self._take(name)
        if not is_whole(value) or value < at_least:
            raise self.refuse(name, f"a whole number of at least {at_least}", value)
        return value

    def whole_or_none(self, name: str) -> int | None:
        """Read a whole number that is not negative. Null is None."""
        value = self._take(name)
        if value is not None and not (is_whole(value) and value >= 0):
            raise self.refuse(name, "a whole number of at least 0, or null", value)
        return value

    def number(self, name: str) -> float:
        """Read a finite number that is not negative."""
        return self._number(name, self._take(name))

    def number_or_none(self, name: str) -> float | None:
        """Read a finite number that is not negative, or null."""
        value = self._take(name)
        return None if value is None else self._number(name, value)

    def number_if_there(self, name: str) -> float | None:
        """Read a finite number that is not negative. A field that writers may omit is None."""
        return self.number(name) if name in self._left else None

    def wholes_or_none(self, name: str) -> tuple[int, ...] | None:
        """Read a list of whole numbers that are not negative. Null is None."""
        value = self._take(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.refuse(name, "a list of whole numbers or null", value)
        items = cast("list[object]", value)
        wholes = tuple(one for one in items if is_whole(one) and one >= 0)
        if len(wholes) < len(items):
            raise self.refuse(name, "a list of whole numbers or null", value)
        return wholes

    def instant(self, name: str) -> float:
        """Read a finite number of either sign, such as a time of a clock."""
        value = self._take(name)
        if not is_finite(value):
            raise self.refuse(name, "a finite number", value)
        return float(value)

    def text(self, name: str, at_most: int = MAX_BYTES) -> str:
        """Read a string of bounded length."""
        value = self._take(name)
        if not isinstance(value, str) or len(value) > at_most:
            raise self.refuse(name, f"a string of at most {at_most} characters", value)
        return value

    def flag(self, name: str) -> bool:
        """Read true or false."""
        value = self._take(name)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false", value)
        return value

    def flag_or_false(self, name: str) -> bool:
        """Read true or false. A field that writers may omit is false."""
        return name in self._left and self.flag(name)

    def items(self, name: str) -> list[object]:
        """Read a list; the caller checks its items."""
        value = self._take(name)
        if not isinstance(value, list):
            raise self.refuse(name, "a list", value)
        return cast("list[object]", value)

    def rows(self, name: str) -> list[list[float]]:
        """Read a list of lists of finite numbers that are not negative."""
        rows = self.items(name)
        if not all(isinstance(row, list) for row in rows):
            raise self.refuse(name, "a list of lists", rows)
        return [[self._number(name, value) for value in cast("list[object]", row)] for row in rows]

    def objects(self, name: str) -> list[Fields]:
        """Read a list of objects."""
        return [Fields(item, f"{self._where}: {name}[{index}]") for index, item in enumerate(self.items(name))]

    def raw(self, name: str) -> object:
        """Read a field that the caller checks."""
        return self._take(name)

    def raw_or_none(self, name: str) -> object:
        """Read a field that the caller checks. Null, or a field that writers may omit, is None."""
        return self._left.pop(name, None)

    def end(self) -> None:
        """Refuse fields that were not read."""
        if self._left:
            raise ControlError(f"{self._where}: unknown field {min(self._left)!r}")

    def _take(self, name: str) -> object:
        if name not in self._left:
            raise ControlError(f"{self._where}: missing field {name!r}")
        return self._left.pop(name)

    def _number(self, name: str, value: object) -> float:
        if not is_finite(value) or value < 0:
            raise self.refuse(name, "a finite number that is not negative", value)
        return float(value)

    def refuse(self, name: str, expected: str, value: object) -> ControlError:
        """Return the error for a field that is not as expected."""
        shown = repr(value)
        return ControlError(f"{self._where}: field {name!r}: expected {expected}, got {shown[:80]}")
