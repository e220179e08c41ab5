"""What only a case's JSON object has among its fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from adaptra.errors import CaseError
from adaptra.json_files import Fields


def placement_of(fields: Fields, stages: int) -> tuple[int, ...]:
    """Read the rank of each stage, given one list of stages per rank; stage i on rank i without the field.

    Raises:
        CaseError: The field is not one.
    """
    placement = fields.raw("placement", None)
    if placement is None:
        return tuple(range(stages))
    if not isinstance(placement, list) or not all(isinstance(held, list) and held for held in cast("list[Any]", placement)):
        raise fields.refuse("placement", "a list with one list of stages per rank", cast("object", placement))
    held_by = cast("list[list[Any]]", placement)
    held_stages = [stage for held in held_by for stage in held]
    if any(type(stage) is not int for stage in held_stages) or sorted(held_stages) != list(range(stages)):
        raise fields.refuse("placement", f"each of the stages 0..{stages - 1} once", held_by)
    rank_of = {stage: rank for rank, held in enumerate(held_by) for stage in held}
    return tuple(rank_of[stage] for stage in range(stages))


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
