"""Changes that cost something once and save something with every step after them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from adaptra.program.roles import Roles, moved

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayoutChange(Generic[T]):
    """A change that wins, or may.

    Attributes:
        before, after: What changes.
        seconds_before, seconds_after: What a step takes, by simulation.
        moving: What the change takes once, seconds.
    """

    before: T
    after: T
    seconds_before: float
    seconds_after: float
    moving: float

    @abstractmethod
    def what(self) -> str:
        """What changes, for people."""

    def saved(self, horizon: int) -> float:
        """Seconds that so many steps are shorter together, what moving takes off."""
        return horizon * (self.seconds_before - self.seconds_after) - self.moving

    def __str__(self) -> str:
        steps = self.moving / (self.seconds_before - self.seconds_after)
        return (
            f"{self.what()}: {1e3 * self.seconds_after:.1f} ms a step instead of {1e3 * self.seconds_before:.1f} ms; moving "
            f"takes {1e3 * self.moving:.0f} ms, {steps:.0f} steps' gain"
        )


class RoleChange(LayoutChange[Roles]):
    """Of which rank holds which stage of which replica."""

    __slots__ = ()

    def what(self) -> str:
        """The ranks that take another role."""
        return ", ".join(
            f"rank {rank} from stage {self.before.of(rank)[1]} of replica {self.before.of(rank)[0]} to stage "
            f"{self.after.of(rank)[1]} of {self.after.of(rank)[0]}"
            for rank in moved(self.before, self.after)
        )


class SplitChange(LayoutChange[tuple[str | None, ...]]):
    """Of the modules at which stages 1, 2, … begin; None where a stage begins at none."""

    __slots__ = ()

    def what(self) -> str:
        """The stages that begin elsewhere."""
        return ", ".join(
            f"stage {stage} beginning at {now!r} instead of {_named(was)}"
            for stage, (was, now) in enumerate(zip(self.before, self.after, strict=True), 1)
            if was != now
        )


def _named(module: str | None) -> str:
    return "within a module" if module is None else repr(module)
