"""What is suspected but not yet sure, and whether it is worth planning for already.

A suspicion is what one step shows and the next may confirm. A plan made and confirmed for it meanwhile can run a step sooner if
it comes true, and was made for nothing if it does not. On a noisy machine most come to nothing, so after each one in a row its
places are not suspected for twice as long, up to a few steps: planning takes processor time from training, and a change that
begins there in such a pause is adapted to a step or two later.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from adaptra.runtime.detection.changes import AGREEMENT, Change, Where
from adaptra.runtime.detection.detector import Detection

FIRST_PAUSE: Final = 2
"""Steps without planning ahead after the first suspicion that came to nothing."""

MOST_PAUSE: Final = 8
"""Steps without planning ahead after many in a row."""


class _Pause(NamedTuple):
    """Until which step a place is not suspected, and for how many it will not be if that comes to nothing again."""

    resumes: int
    following: int


class Speculation:
    """Follows suspicions from step to step."""

    def __init__(self) -> None:
        self._suspicion: Detection | None = None
        self._pauses: dict[Where, _Pause] = {}

    @property
    def suspicion(self) -> Detection | None:
        """What is suspected now, if it is worth planning for."""
        return self._suspicion

    def suspect(self, step: int, suspicion: Detection | None) -> None:
        """A step has confirmed nothing and foreshadows this. What it says as before stays the very same suspicion."""
        if suspicion is not None and any(step >= self._pause(where).resumes for where in _places(suspicion)):
            if self._suspicion is None or not _agree(self._suspicion, suspicion):
                self._suspicion = suspicion
        elif self._suspicion is not None:
            for where in _places(self._suspicion):
                length = self._pause(where).following
                self._pauses[where] = _Pause(step + length, min(2 * length, MOST_PAUSE))
            self._suspicion = None

    def confirm(self) -> None:
        """Something was detected: it is not suspected any more, and suspicions count again."""
        self._suspicion = None
        self._pauses.clear()

    def _pause(self, where: Where) -> _Pause:
        return self._pauses.get(where, _Pause(0, FIRST_PAUSE))


def _agree(one: Detection, other: Detection) -> bool:
    """Whether two suspicions are of the same places and by about as much."""
    before, now = _places(one), _places(other)
    return before.keys() == now.keys() and all(
        abs(change.now - before[place].now) <= AGREEMENT * abs(change.now - change.was) for place, change in now.items()
    )


def _places(detection: Detection) -> dict[Where, Change]:
    return {change.where: change for change in detection.changes}
