"""Fields of a case's JSON object, each checked as it is read. An error names the field, its value and what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from adaptra.checks import is_real, is_whole
from adaptra.errors import CaseError

_MOST: Final = 1_000_000
"""The most stages, replicas or microbatches of a case. More are refused before they fill the memory."""
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

    def has(self, name: str) -> bool:
        """Return True if a field is there."""
        return name in self._fields

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
        if not is_whole(value) or value < 1:
            raise self._refused(name, "a whole number of at least 1", repr(value))
        if value > _MOST:
            raise self._refused(name, f"at most {_MOST}", repr(value))
        return value

    def flag(self, name: str) -> bool:
        """Return whether a field is true; false if it is missing."""
        value = self.given(name, False)
        if not isinstance(value, bool):
            raise self._refused(name, "true or false", repr(value))
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """Return a finite number that is not negative."""
        return self._number(name, self.given(name, default))

    def numbers(self, name: str, count: int, default: Any = _REQUIRED, null: Any = None) -> tuple[float, ...]:
        """Return ``count`` numbers; a single number stands for all, and JSON's null for ``null``."""
        value = self.given(name, default)
        given = null if value is None else value
        values: list[Any] = list(given) if isinstance(given, list | tuple) else [given] * count
        expected = f"a number or a list of {count}"
        if len(values) != count:
            raise self._refused(name, expected, f"a list of {len(values)}")
        for one in values:
            if not is_real(one):
                raise self._refused(name, expected, repr(one))
        try:
            numbers = tuple(float(one) for one in values)
        except OverflowError:
            raise self._refused(name, "numbers of at most 1.8e308", "a larger one") from None
        check_numbers(f"{self._where}{name}", numbers, count)
        return numbers

    def numbers_by_name(self, name: str) -> dict[str, float]:
        """Return an object of numbers; empty if the field is missing."""
        return {key: self._number(f"{name}: {key}", value) for key, value in self.objects(name).items()}

    def objects(self, name: str) -> Mapping[str, Any]:
        """Return an object; empty if the field is missing."""
        value = self.given(name, {})
        if not isinstance(value, Mapping):
            raise self._refused(name, "a JSON object", type(value).__name__)
        return cast("Mapping[str, Any]", value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; empty if the field is missing."""
        value = self.given(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in cast("list[Any]", value)):
            raise self._refused(name, "a list of texts", repr(value))
        return tuple(cast("list[str]", value))

    def indices(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers from 0 on; empty if the field is missing."""
        value = self.given(name, [])
        if not isinstance(value, list) or not all(is_whole(one) and one >= 0 for one in cast("list[Any]", value)):
            raise self._refused(name, "a list of whole numbers from 0 on", repr(value))
        return tuple(map(int, cast("list[Any]", value)))

    def one_of(self, name: str, choices: Sequence[str]) -> str:
        """Return one of the choices; the first if the field is missing."""
        value = self.given(name, choices[0])
        if value not in choices:
            raise self._refused(name, f"one of {', '.join(choices)}", repr(value))
        return value

    def placement(self, stages: int) -> tuple[int, ...]:
        """Return the rank of each stage, given one list of stages per rank; stage i on rank i without the field."""
        given = self.given("placement", None)
        if given is None:
            return tuple(range(stages))
        if not isinstance(given, list) or not all(isinstance(held, list) and held for held in cast("list[Any]", given)):
            raise self._refused("placement", "a list with one list of stages per rank", repr(cast("object", given)))
        held_by = cast("list[list[Any]]", given)
        held_stages = [stage for held in held_by for stage in held]
        if any(type(stage) is not int for stage in held_stages) or sorted(held_stages) != list(range(stages)):
            raise self._refused("placement", f"each of the stages 0..{stages - 1} once", repr(held_by))
        rank_of = {stage: rank for rank, held in enumerate(held_by) for stage in held}
        return tuple(rank_of[stage] for stage in range(stages))

    def _number(self, name: str, value: Any) -> float:
        if not is_real(value):
            raise self._refused(name, "a number", repr(value))
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and number >= 0):
            raise self._refused(name, "a finite number that is not negative", repr(value))
        return number

    def _refused(self, name: str, expected: str, got: str) -> CaseError:
        return CaseError(f"{self._where}{name}: expected {expected}, got {got:.80}")


def check_numbers(name: str, values: Sequence[float], count: int) -> None:
    """Refuse numbers that are not ``count``, negative or not finite.

    Raises:
        CaseError: They are refused; ``name`` begins the error.
    """
    if len(values) != count:
        raise CaseError(f"{name}: expected {count} numbers, got {len(values)}")
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise CaseError(f"{name}[{index}] is {value}: expected a finite number that is not negative")
