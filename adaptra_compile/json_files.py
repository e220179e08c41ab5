"""JSON that users or other ranks give: whether it is any, and its fields, each checked as it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from adaptra.checks import is_finite, is_real, is_whole
from adaptra.errors import AdaptraError, ControlError

_REQUIRED: Final = object()


def read_json(path: str | Path, refused: type[AdaptraError]) -> Any:
    """Return what a JSON file holds.

    Raises:
        AdaptraError: The file can't be read or is not JSON: an error of the class ``refused``, which names the file.
    """
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise refused(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise refused(f"{path}: not JSON: {error}") from error


class Fields:
    """The fields of one JSON object. An error names the object, the field, what was expected and what was given.

    Every method reads one field, and refuses it if it is missing, unless it takes a default or says so.

    Args:
        data: The decoded object.
        where: The beginning of every error, such as ``measurement of rank 2``; empty where the caller says it.
        refused: The class of every error.

    Raises:
        AdaptraError: ``data`` is not an object; every method raises it for a field that is not as expected.
    """

    def __init__(self, data: object, where: str, refused: type[AdaptraError] = ControlError) -> None:
        self._where = f"{where}: " if where else ""
        self._refused = refused
        if not isinstance(data, Mapping):
            raise self.error(f"expected a JSON object, got {type(data).__name__}")
        self._fields = cast("Mapping[str, object]", data)
        self._asked: set[str] = set()

    def has(self, name: str) -> bool:
        """Return whether a field is there."""
        self._asked.add(name)
        return name in self._fields

    def raw(self, name: str, default: object = _REQUIRED) -> Any:
        """Read a field that the caller checks."""
        if self.has(name):
            return self._fields[name]
        if default is _REQUIRED:
            raise self.error(f"missing field {name!r}")
        return default

    def whole(self, name: str, at_least: int = 0, at_most: int | None = None) -> int:
        """Read a whole number."""
        value = self.raw(name)
        if not is_whole(value) or value < at_least:
            raise self.refuse(name, f"a whole number of at least {at_least}", value)
        if at_most is not None and value > at_most:
            raise self.refuse(name, f"at most {at_most}", value)
        return value

    def whole_or_none(self, name: str) -> int | None:
        """Read a whole number that is not negative. Null is None."""
        value = self.raw(name)
        if value is not None and not (is_whole(value) and value >= 0):
            raise self.refuse(name, "a whole number of at least 0, or null", value)
        return value

    def wholes(self, name: str, default: object = _REQUIRED) -> tuple[int, ...]:
        """Read a list of whole numbers that are not negative."""
        value = self.raw(name, default)
        if not isinstance(value, list | tuple) or not all(is_whole(one) and one >= 0 for one in cast("list[object]", value)):
            raise self.refuse(name, "a list of whole numbers of at least 0", value)
        return tuple(cast("list[int]", value))

    def wholes_or_none(self, name: str) -> tuple[int, ...] | None:
        """Read a list of whole numbers that are not negative. Null is None."""
        return None if self.raw(name) is None else self.wholes(name)

    def number(self, name: str, default: object = _REQUIRED) -> float:
        """Read a finite number that is not negative."""
        return self._number(name, self.raw(name, default))

    def number_or_none(self, name: str) -> float | None:
        """Read a finite number that is not negative, or null."""
        value = self.raw(name)
        return None if value is None else self._number(name, value)

    def number_if_there(self, name: str) -> float | None:
        """Read a finite number that is not negative. A field that writers may omit is None."""
        return self.number(name) if self.has(name) else None

    def numbers(self, name: str, count: int, default: object = _REQUIRED, null: object = None) -> tuple[float, ...]:
        """Read ``count`` finite numbers that are not negative. A single number stands for all, and JSON's null for ``null``."""
        value = self.raw(name, default)
        value = null if value is None else value
        values = cast("Sequence[object]", value) if isinstance(value, list | tuple) else None
        if not is_real(value) and (values is None or len(values) != count):
            raise self.refuse(name, f"a number or a list of {count}", value)
        if values is None:
            return (self._number(name, value),) * count
        return tuple(self._number(f"{name}[{index}]", one) for index, one in enumerate(values))

    def numbers_by_name(self, name: str) -> dict[str, float]:
        """Read an object of finite numbers that are not negative. A field that writers may omit is empty."""
        return {key: self._number(f"{name}.{key}", value) for key, value in self.by_name(name).items()}

    def instant(self, name: str) -> float:
        """Read a finite number of either sign, such as a time of a clock."""
        value = self.raw(name)
        if not is_finite(value):
            raise self.refuse(name, "a finite number", value)
        return float(value)

    def text(self, name: str, at_most: int | None = None) -> str:
        """Read a string, of bounded length if ``at_most`` is given."""
        value = self.raw(name)
        if not isinstance(value, str) or (at_most is not None and len(value) > at_most):
            raise self.refuse(name, "a string" if at_most is None else f"a string of at most {at_most} characters", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Read a list of strings. A field that writers may omit is empty."""
        value = self.raw(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in cast("list[object]", value)):
            raise self.refuse(name, "a list of strings", value)
        return tuple(cast("list[str]", value))

    def one_of(self, name: str, choices: Sequence[str]) -> str:
        """Read one of the choices. A field that writers may omit is the first."""
        value = self.raw(name, choices[0])
        if value not in choices:
            raise self.refuse(name, f"one of {', '.join(choices)}", value)
        return value

    def flag(self, name: str, default: object = _REQUIRED) -> bool:
        """Read true or false."""
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false", value)
        return value

    def items(self, name: str) -> list[object]:
        """Read a list; the caller checks its items."""
        value = self.raw(name)
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
        return [Fields(item, f"{self._where}{name}[{index}]", self._refused) for index, item in enumerate(self.items(name))]

    def by_name(self, name: str) -> Mapping[str, object]:
        """Read an object whose names are its own; the caller checks its values. A field that writers may omit is empty."""
        value = self.raw(name, {})
        if not isinstance(value, Mapping):
            raise self.refuse(name, "a JSON object", value)
        return cast("Mapping[str, object]", value)

    def end(self) -> None:
        """Refuse fields that were not asked for."""
        if unknown := self._fields.keys() - self._asked:
            raise self.error(f"unknown field {min(unknown)!r}: expected some of {', '.join(sorted(self._asked))}")

    def refuse(self, name: str, expected: str, value: object) -> AdaptraError:
        """Return the error for a field that is not as expected."""
        return self.error(f"field {name!r}: expected {expected}, got {value!r:.80}")

    def error(self, text: str) -> AdaptraError:
        """Return an error of this object."""
        return self._refused(f"{self._where}{text}")

    def _number(self, name: str, value: object) -> float:
        if not is_finite(value) or value < 0:
            raise self.refuse(name, "a finite number that is not negative", value)
        return float(value)
