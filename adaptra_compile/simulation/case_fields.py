"""Fields of a case's JSON object, each checked as it is read. An error names the field, its value and what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, cast

from adaptra.errors import CaseError

_MOST: Final = 1_000_000
"""The largest count of stages, replicas or microbatches. More are refused before they fill the memory."""
_REQUIRED: Final = object()


class CaseFields:
    """The fields of one JSON object.

    Args:
        data: The object.
        where: The start of every error.

    Raises:
        CaseError: ``data`` is no object.
    """

    def __init__(self, data: object, where: str = "") -> None:
        if not isinstance(data, Mapping):
            raise CaseError(f"{where}expected a JSON object, got {type(data).__name__}")
        self._fields = cast("Mapping[str, Any]", data)
        self._where = where

    def only(self, known: frozenset[str]) -> None:
        """Refuse fields that are not ``known``."""
        unknown = set(self._fields) - known
        if unknown:
            raise CaseError(f"{self._where}unknown field {min(unknown)!r}: expected some of {', '.join(sorted(known))}")

    def given(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a field as it is; without a default it is required."""
        if name in self._fields:
            return self._fields[name]
        if default is _REQUIRED:
            raise CaseError(f"{self._where}missing field {name!r}")
        return default

    def count(self, name: str) -> int:
        """Return a required whole number of at least 1."""
        value = self.given(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._refused(name, "a whole number of at least 1", value)
        if value > _MOST:
            raise self._refused(name, f"at most {_MOST}", value)
        return value

    def flag(self, name: str) -> bool:
        """Return whether a field is true; false if it is missing."""
        value = self.given(name, False)
        if not isinstance(value, bool):
            raise self._refused(name, "true or false", value)
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """Return a finite number that is not negative."""
        return self._number(name, self.given(name, default))

    def numbers(self, name: str, count: int, default: Any = _REQUIRED) -> tuple[float, ...]:
        """Return ``count`` numbers; a single number stands for all."""
        value = self.given(name, default)
        values: list[Any] = list(cast("list[Any]", value)) if isinstance(value, list) else [value] * count
        if len(values) != count:
            raise CaseError(f"{self._where}{name}: expected a number or a list of {count}, got a list of {len(values)}")
        return tuple(self._number(name, one) for one in values)

    def numbers_by_name(self, name: str) -> dict[str, float]:
        """Return an object of numbers; empty if the field is missing."""
        return {key: self._number(f"{name}: {key}", value) for key, value in self.objects(name).items()}

    def objects(self, name: str) -> Mapping[str, Any]:
        """Return an object; empty if the field is missing."""
        value = self.given(name, {})
        if not isinstance(value, Mapping):
            raise self._refused(name, "a JSON object", value)
        return cast("Mapping[str, Any]", value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; empty if the field is missing."""
        value = self.given(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in cast("list[Any]", value)):
            raise self._refused(name, "a list of texts", value)
        return tuple(cast("list[str]", value))

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refused(name, "a number", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and number >= 0):
            raise self._refused(name, "a finite number that is not negative", value)
        return number

    def _refused(self, name: str, expected: str, value: object) -> CaseError:
        return CaseError(f"{self._where}{name}: expected {expected}, got {value!r:.80}")
