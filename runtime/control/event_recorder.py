"""The events of one rank, with the activation memory of the plans that they are about."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from adaptra.planning.layouts.layout_change import RoleChange, SplitChange
from adaptra.program import Program
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.simulation.simulate import simulate

KEPT_EVENTS: Final = 4096
"""The number of events that are kept."""

_WITH_MEMORY: Final = (EventKind.PROPOSED, EventKind.AGREED, EventKind.SWITCHED)

_KEPT_PLANS: Final = 8
"""The number of the latest plans whose memory use is remembered."""


class EventRecorder:
    """Keeps the last events and passes each on. Any thread may emit one.

    Events name a rank by its place in its pipeline.

    Args:
        place: This rank within its pipeline.
        running: The plan that this rank runs first.
        step: The first step that it runs.
        on_event: Called with each event by the thread that emits it.
        known: Returns the plan of a version, if this rank has it.
        activation_bytes: The most bytes of activations on each rank under a program, where they are known.

    Attributes:
        running: The plan that this rank runs.
        step: The step that it runs.
    """

    def __init__(
        self,
        place: int,
        running: Plan,
        step: int,
        on_event: Callable[[ControlEvent], None] | None,
        known: Callable[[int], Plan | None],
        activation_bytes: Callable[[Program], tuple[int, ...]] | None,
    ) -> None:
        self._place = place
        self.running = running
        self.step = step
        self._on_event = on_event
        self._known = known
        self._activation_bytes = activation_bytes
        self._earlier: tuple[ControlEvent, ...] = ()
        self._events: deque[ControlEvent] = deque(maxlen=KEPT_EVENTS)
        self._memory: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    @property
    def events(self) -> tuple[ControlEvent, ...]:
        """The last events, oldest first."""
        return (*self._earlier, *self._events)[-KEPT_EVENTS:]

    def go_on_after(self, earlier: EventRecorder) -> None:
        """Keep the events of the recorder that this one replaces."""
        self._earlier = earlier.events

    def emit(self, event: ControlEvent) -> None:
        """Keep an event of this rank and pass it on, with its plan's activation memory if that plan may run."""
        event = replace(event, rank=self._place)
        if event.kind in _WITH_MEMORY:
            plan = None if event.version in self._memory else self._known(event.version)
            if plan is not None:
                self.compute_memory(plan)
            in_flight, memory = self._memory.get(event.version, (None, None))
            event = replace(event, in_flight=in_flight, memory=memory)
        self._events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def emit_now(self, kind: EventKind, text: str, predicted: float | None = None, before: float | None = None) -> None:
        """Emit an event about the plan and the step that this rank runs."""
        self.emit(ControlEvent(kind, self._place, self.step, self.running.version, text, predicted, before))

    def emit_change(self, change: RoleChange | SplitChange) -> None:
        """Emit the event of a role change or a cut change before the next step."""
        kind = EventKind.ROLES if isinstance(change, RoleChange) else EventKind.SPLIT
        self.emit_now(kind, str(change), change.seconds_after, change.seconds_before)

    def compute_memory(self, plan: Plan) -> None:
        """Compute the activation memory of a plan before an event needs it. Results of the last few plans are remembered."""
        if self._activation_bytes is not None and plan.version not in self._memory:
            found = simulate(plan.program, plan.case.cost)
            in_flight = found.peak_in_flight if plan.program.is_one_pipeline else found.in_flight
            self._memory[plan.version] = in_flight, self._activation_bytes(plan.program)
            for version in sorted(self._memory)[:-_KEPT_PLANS]:
                self._memory.pop(version, None)
