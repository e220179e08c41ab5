"""The controller's events, typed, for logs, live tables and tests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from adaptra.sizes import size_text


class EventKind(Enum):
    """The kind of an event. The coordinating rank emits DETECTED to LIMITED, and each rank the others for itself."""

    DETECTED = "detected"
    """The cost model changed; ``text`` says how."""
    KEPT = "kept"
    """No other plan is worth a switch, or switching is turned off."""
    PROPOSED = "proposed"
    """The coordinator proposed a better plan. If ``text`` begins with "in case of", the plan is speculative."""
    AGREED = "agreed"
    """All ranks have confirmed a plan and run it from ``step`` on."""
    WITHDRAWN = "withdrawn"
    """A proposal ended: a rank refused it or did not answer in time, or the suspicion was not confirmed. All ranks keep the old
    plan.
    """
    LIMITED = "limited"
    """An edge's bandwidth limits the step, which no order hides; ``text`` names the remedies and the bound that remains with
    each.
    """
    CONFIRMED = "confirmed"
    """This rank is ready to run a plan."""
    REFUSED = "refused"
    """This rank can't run a plan; ``text`` says why."""
    SWITCHED = "switched"
    """This rank is about to run ``step``, the first one under another plan."""
    SHARED = "shared"
    """From ``step`` on, other replicas' workers compute microbatches of slow ones; ``text`` says which, of how many."""
    DETOURED = "detoured"
    """From ``step`` on, microbatches go round a slow link through other replicas' workers; ``text`` says which, of how many."""
    ROLES = "roles"
    """The ranks of the job have changed roles, so that a slow link carries other messages; ``text`` says which, and why."""
    SPLIT = "split"
    """The model is cut at other positions, where messages are smaller; ``text`` says where, and why."""
    LATE = "late"
    """After ``step`` the gradients of this rank's stages are added in another way, as replicas come late or no longer do.
    After the first one: as a port was measured to be narrow. ``text`` says who, by how much, which way, and what others
    would take.
    """
    EXCHANGED = "exchanged"
    """After ``step`` this rank's site has exchanged with others what they had learnt. ``text`` says of which stage, who took
    part and by what weight, and how long it took.
    """
    UPDATED = "updated"
    """This rank's replica is in an update in x-order. ``text`` says which, who is in it, and how old their gradients are."""
    DEFERRED = "deferred"
    """Microbatches of this rank's replica come only in the next step, as a deadline was over. ``text`` says which."""
    MODE = "mode"
    """After ``step`` an update waits for something else. ``text`` says what the mode was and is, and how long the change took.
    """
    TRIAL = "trial"
    """Modes of synchronisation were tried after ``step``. ``text`` says which goes on, and the figures of each."""
    STOLEN = "stolen"
    """In the step that has just run, others have computed microbatches that this replica had not begun; ``text`` says which,
    and who. Of the first stage's rank alone.
    """
    COORDINATES = "coordinates"
    """This rank coordinates from now on, in place of another."""
    RESIGNED = "resigned"
    """This rank failed in coordinating and leaves it to another; ``text`` is the error."""
    COMPILED = "compiled"
    """The model was compiled for batches of another shape; ``text`` has their sizes and the time. Of the first rank alone."""
    FORGOTTEN = "forgotten"
    """A shape of batch is not kept any more, as others were used later; ``text`` has its sizes. Of the first rank alone."""
    LOST = "lost"
    """Processes are lost, and the others go on; ``text`` says which, and how their epoch broke. Of the first rank alone."""
    HOSTED = "hosted"
    """A rank hosts workers of lost processes from now on; ``text`` says which. Of the first rank alone."""
    REDONE = "redone"
    """A call has broken, and is done again; ``text`` names it. Of the first rank alone."""
    FENCED = "fenced"
    """The others have gone on without this rank, which they took for lost."""
    LINK = "link"
    """An RDMA device of this rank reported an event such as a port that went down; ``text`` has it and the state of the
    ports.
    """


@dataclass(frozen=True, slots=True)
class ControlEvent:
    """One event.

    Attributes:
        kind: The kind of event.
        rank: The rank that emits it.
        step: The last measured step for DETECTED to LIMITED, and the plan's first step for AGREED and SWITCHED. For other
            kinds, the last step that this rank has run or asked for.
        version: The plan that it is about.
        text: A description for people.
        predicted: That plan's simulated seconds of a step, where they are known: the makespan behind a barrier, otherwise the
            period.
        predicted_before: The same of the plan that it replaces or would replace, under the same cost model.
        in_flight: Per stage, the most microbatches that the plan has between F and I; of PROPOSED, AGREED and SWITCHED.
        memory: Per rank, the most bytes of activations at a time under the plan; of the same events.
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
        held = f"; {self._memory_text}" if self.memory and self.in_flight else ""
        return f"step {self.step}: {self.kind.value} plan {self.version}: {self.text}{held}"

    @property
    def _memory_text(self) -> str:
        return f"at most {max(self.in_flight or ())} microbatches in flight, {size_text(max(self.memory or ()))} on a rank"

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object."""
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
