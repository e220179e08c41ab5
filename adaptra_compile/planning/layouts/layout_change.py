"""Changes of roles or of cut points, with their one-time cost and their saving per step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from adaptra.program.placement import stages_of
from adaptra.program.roles import Roles, moved
from adaptra.unlike_numbers import milliseconds_apart

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayoutChange(ABC, Generic[T]):
    """A change of the layout, with its cost and its saving.

    Attributes:
        before, after: The layouts.
        seconds_before, seconds_after: Simulated seconds of a step.
        moving: One-time cost of the change, in seconds.
    """

    before: T
    after: T
    seconds_before: float
    seconds_after: float
    moving: float

    @abstractmethod
    def what(self) -> str:
        """Return a description of the change, for people."""

    def saved(self, horizon: int) -> float:
        """Return the net seconds saved over ``horizon`` steps, one-time cost subtracted."""
        return horizon * (self.seconds_before - self.seconds_after) - self.moving

    def __str__(self) -> str:
        steps = self.moving / (self.seconds_before - self.seconds_after)
        after, before = milliseconds_apart(self.seconds_after, self.seconds_before)
        return (
            f"{self.what()}: {after} a step instead of {before}; moving takes {1e3 * self.moving:.0f} ms, "
            f"{steps:.0f} steps' gain"
        )


@dataclass(frozen=True, slots=True)
class RoleChange(LayoutChange[Roles]):
    """A change of the rank that each stage of each replica is on.

    Attributes:
        placement: The rank of each stage within its pipeline; stage i on rank i if empty.
    """

    placement: tuple[int, ...] = ()

    def what(self) -> str:
        """Return a description of the ranks that change roles."""
        return ", ".join(
            f"rank {rank} from {self._stages(before)} of replica {old} to {self._stages(after)} of {new}"
            for rank in moved(self.before, self.after)
            for (old, before), (new, after) in [(self.before.of(rank), self.after.of(rank))]
        )

    def _stages(self, place: int) -> str:
        """Return the stages of one rank of a pipeline, for people."""
        stages = stages_of(place, self.placement) if self.placement else (place,)
        return f"{'stage' if len(stages) == 1 else 'stages'} {' and '.join(map(str, stages))}"


class SplitChange(LayoutChange[tuple[str | None, ...]]):
    """A change of the modules at which stages 1, 2, … begin. None stands for a stage that begins at no module."""

    __slots__ = ()

    def what(self) -> str:
        """Return a description of the stages whose cut points move."""
        return ", ".join(
            f"stage {stage} beginning at {now!r} instead of {_named(was)}"
            for stage, (was, now) in enumerate(zip(self.before, self.after, strict=True), 1)
            if was != now
        )


def _named(module: str | None) -> str:
    return "within a module" if module is None else repr(module)
