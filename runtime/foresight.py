"""What is suspected but not yet sure, and whether it is worth planning for already.

A suspicion is what one step shows and the next may confirm. A plan made and confirmed for it meanwhile can run a step sooner if
it comes true, and was made for nothing if it does not. On a noisy machine most come to nothing, so after each one in a row the
pause before the next is twice as long, up to a few steps: planning takes processor time from training, and a change that begins
in a pause is adapted to a step or two later.
"""

from __future__ import annotations

from typing import Final

from adaptra.runtime.changes import AGREEMENT, Change, EdgeChange, LossChange, StageChange
from adaptra.runtime.detector import Detection

FIRST_PAUSE: Final = 2
"""Steps without planning ahead after the first suspicion that came to nothing."""

MOST_PAUSE: Final = 8
"""Steps without planning ahead after many in a row."""


class Foresight:
    """Follows suspicions from step to step."""

    def __init__(self) -> None:
        self._suspicion: Detection | None = None
        self._pause = FIRST_PAUSE
        self._resumes = 0

    @property
    def suspicion(self) -> Detection | None:
        """What is suspected now, if it is worth planning for."""
        return self._suspicion

    def suspect(self, step: int, suspicion: Detection | None) -> None:
        """A step has confirmed nothing and foreshadows this. What it says as before stays the very same suspicion."""
        if suspicion is not None and step >= self._resumes:
            if self._suspicion is None or not _agree(self._suspicion, suspicion):
                self._suspicion = suspicion
        elif self._suspicion is not None:
            self._suspicion = None
            self._resumes = step + self._pause
            self._pause = min(2 * self._pause, MOST_PAUSE)

    def confirm(self) -> None:
        """Something was detected: it is not suspected any more, and suspicions count again."""
        self._suspicion = None
        self._pause, self._resumes = FIRST_PAUSE, 0


def _agree(one: Detection, other: Detection) -> bool:
    """Whether two suspicions are of the same places and by about as much."""
    before, now = _places(one), _places(other)
    return before.keys() == now.keys() and all(
        abs(change.now - before[place].now) <= AGREEMENT * abs(change.now - change.was) for place, change in now.items()
    )


def _places(detection: Detection) -> dict[tuple[int, ...], Change]:
    places: dict[tuple[int, ...], Change] = {}
    for change in detection.changes:
        match change:
            case StageChange():
                places[change.stage,] = change
            case EdgeChange() | LossChange():
                places[change.source, change.destination] = change
    return places
