"""Suspected changes, and whether to plan for them speculatively.

A suspicion is a change that one step shows and the next may confirm. A speculative plan is made and confirmed by the ranks
meanwhile. If the change is confirmed, it runs a step sooner; otherwise it is discarded.

On a noisy machine most suspicions are not confirmed, and planning takes processor time from training. So each miss in a row
doubles the hold-off of its edges and stages, up to :data:`MOST_PAUSE` steps. A change that begins during a hold-off is adapted
to a step or two later.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from adaptra.runtime.detection.changes import AGREEMENT, Change, Where
from adaptra.runtime.detection.detector import Detection

FIRST_PAUSE: Final = 2
"""Hold-off in steps after the first suspicion that was not confirmed."""

MOST_PAUSE: Final = 8
"""The longest hold-off, in steps."""


class _Pause(NamedTuple):
    """The step at which the hold-off of an edge or stage ends, and the length of the next one in steps."""

    resumes: int
    following: int


class Speculation:
    """Tracks suspicions from step to step.

    Attributes:
        drafted: The last suspicion that was planned for.
    """

    def __init__(self) -> None:
        self.drafted: Detection | None = None
        self._suspicion: Detection | None = None
        self._pauses: dict[Where, _Pause] = {}

    @property
    def suspicion(self) -> Detection | None:
        """The current suspicion, if it is worth planning for."""
        return self._suspicion

    def suspect(self, step: int, suspicion: Detection | None) -> None:
        """Take the suspicion of a step that confirmed nothing, or None.

        A suspicion that agrees with the previous one does not replace it: the object stays the same.
        """
        if suspicion is not None and any(step >= self._pause(where).resumes for where in _places(suspicion)):
            if self._suspicion is None or not _agree(self._suspicion, suspicion):
                self._suspicion = suspicion
        elif self._suspicion is not None:
            for where in _places(self._suspicion):
                length = self._pause(where).following
                self._pauses[where] = _Pause(step + length, min(2 * length, MOST_PAUSE))
            self._suspicion = None

    def confirm(self) -> None:
        """Clear the suspicion and all hold-offs, because a change was detected."""
        self._suspicion = None
        self._pauses.clear()

    def _pause(self, where: Where) -> _Pause:
        return self._pauses.get(where, _Pause(0, FIRST_PAUSE))


def _agree(one: Detection, other: Detection) -> bool:
    """Return True if two suspicions are of the same edges and stages, and of nearly the same size."""
    before, now = _places(one), _places(other)
    return before.keys() == now.keys() and all(
        abs(change.now - before[place].now) <= AGREEMENT * abs(change.now - change.was) for place, change in now.items()
    )


def _places(detection: Detection) -> dict[Where, Change]:
    return {change.where: change for change in detection.changes}
