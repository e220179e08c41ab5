"""What the controller tells about itself: typed events for logs, live tables and tests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from adaptra.sizes import size_text


class EventKind(Enum):
    """What happened. DETECTED to LIMITED are told by the rank that coordinates, the others by each rank for itself."""

    DETECTED = "detected"
    """The cost model changed; ``text`` says how."""
    KEPT = "kept"
    """No other plan is worth a switch, or switching is turned off."""
    PROPOSED = "proposed"
    """A better plan was put to the ranks; where ``text`` begins with "in case of", ahead of a detection that may follow."""
    AGREED = "agreed"
    """All ranks have confirmed a plan and run it from ``step`` on."""
    WITHDRAWN = "withdrawn"
    """A rank refused the plan or did not answer in time, or what was suspected did not come true; all keep the old one."""
    LIMITED = "limited"
    """An edge's bandwidth limits the step, which no order hides; ``text`` says what helps, and what bound then remains."""
    CONFIRMED = "confirmed"
    """This rank is ready to run a plan."""
    REFUSED = "refused"
    """This rank can't run a plan; ``text`` says why."""
    SWITCHED = "switched"
    """This rank is about to run ``step``, the first one under another plan."""
    ROLES = "roles"
    """The ranks of the job have changed roles, so that a slow link carries something else; ``text`` says which, and why."""
    SPLIT = "split"
    """The stages have been cut elsewhere, where less is sent; ``text`` says where, and why."""
    COORDINATES = "coordinates"
    """This rank coordinates from now on, in place of another."""
    RESIGNED = "resigned"
    """This rank failed in coordinating, ``text`` says how, and leaves it to another."""
    LINK = "link"
    """An RDMA device of this rank told of a port that went down, say; ``text`` has that, and what its ports are now."""


@dataclass(frozen=True, slots=True)
class ControlEvent:
    """One event.

    Attributes:
        kind: What happened.
        rank: The rank that tells it.
        step: The step it belongs to: the last one measured for DETECTED to LIMITED, the first one of the plan for AGREED and
            SWITCHED, the last one that this rank has run or asked for otherwise.
        version: The plan it is about.
        text: For people.
        predicted: That plan's simulated makespan, where it is known; seconds.
        predicted_before: The simulated makespan of the plan it replaces or would have, under the same cost model; seconds.
        in_flight: Per stage, the most microbatches that the plan has between F and I; of PROPOSED, AGREED and SWITCHED.
        memory: Per rank, the most bytes of activations that the plan holds at a time; of the same events.
    """

    kind: EventKind
    rank: int
    step: int
    version: int
    text: str
    predicted: float | None = None
    predicted_before: float | None = None
    in_flight: tuple[int, ...] | None = None
    memory: tuple[int, ...] | None = None

    def __str__(self) -> str:
        held = f"; {self._held}" if self.memory and self.in_flight else ""
        return f"step {self.step}: {self.kind.value} plan {self.version}: {self.text}{held}"

    @property
    def _held(self) -> str:
        return f"at most {max(self.in_flight or ())} microbatches in flight, {size_text(max(self.memory or ()))} on a rank"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "kind": self.kind.value,
            "rank": self.rank,
            "step": self.step,
            "version": self.version,
            "text": self.text,
            "predicted": self.predicted,
            "predicted_before": self.predicted_before,
            "in_flight": None if self.in_flight is None else list(self.in_flight),
            "memory": None if self.memory is None else list(self.memory),
        }
