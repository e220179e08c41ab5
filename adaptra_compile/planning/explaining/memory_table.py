"""What memory brings: the shortest step that a short search finds, for less and for more memory on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from adaptra.errors import PlanError
from adaptra.planning.limitation import EFFORT
from adaptra.planning.timing import StepTiming
from adaptra.program import Program
from adaptra.simulation.case import Case
from adaptra.simulation.cost import MEMORY_TOLERANCE
from adaptra.simulation.simulate import simulate

SHARES: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0)
"""Memory for which plans are made, as parts of what the plan holds on its fullest rank."""

_MOST_OPS: Final = 20_000
"""Ops of the largest program for which they are made, within a second."""


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A plan of less or more memory.

    Attributes:
        held: The most memory that a rank holds under it, in the cost model's unit.
        time: The time of a step.
        is_own: Whether it is the plan that is explained.
        is_over: Whether a rank holds more than the case's limit.
    """

    held: float
    time: float
    is_own: bool = False
    is_over: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the point as JSON values."""
        return {"held": self.held, "time": self.time, "is_own": self.is_own, "is_over": self.is_over}


def time_by_memory(case: Case, program: Program, timing: StepTiming) -> tuple[MemoryPoint, ...]:
    """Return the plan and others of less and of more memory, the least first. More memory always brings a shorter step.

    Those that hold more than the case's limits are among them. Of a large program there is none but itself.

    Args:
        case: The case.
        program: A plan for it, with I and W, or B.
        timing: The time that counts.
    """
    own = _point(case, program, timing, is_own=True)
    if 3 * case.cost.stages * case.microbatches > _MOST_OPS or own.held == 0.0:
        return (own,)
    found = sorted([own, *_others(case, own.held, timing)], key=lambda point: (point.held, point.time, not point.is_own))
    kept: list[MemoryPoint] = []
    for point in found:
        if point.is_own or not kept or point.time < min(one.time for one in kept) * (1 - MEMORY_TOLERANCE):
            kept.append(point)
    return tuple(kept)


def _others(case: Case, held: float, timing: StepTiming) -> Iterator[MemoryPoint]:
    for share in SHARES:
        limited = replace(case, cost=case.cost.limited((share * held,) * len(set(case.placement))))
        try:
            program = timing.plan(limited, effort=EFFORT)
        except PlanError:
            continue
        if not simulate(program, limited.cost).over_memory:
            yield _point(case, program, timing)


def _point(case: Case, program: Program, timing: StepTiming, *, is_own: bool = False) -> MemoryPoint:
    found = simulate(program, case.cost)
    return MemoryPoint(max(found.peak_memory), timing.of(program, case.cost), is_own, bool(found.over_memory))
