"""The events of one rank, with the activation memory of the plans that they are about."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from adaptra.program import Program
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.simulation.period import simulate_alike
from adaptra.simulation.simulate import simulate

KEPT_EVENTS: Final = 4096
"""The number of events that are kept."""

_WITH_MEMORY: Final = (EventKind.PROPOSED, EventKind.AGREED, EventKind.SWITCHED)

_KEPT_PLANS: Final = 8
"""The number of the latest plans whose memory use is remembered."""


class EventRecorder:
    """Keeps the last events and passes each on. Any thread may emit one.

    Args:
        on_event: Called with each event by the thread that emits it.
        known: Returns the plan of a version, if this rank has it.
        activation_bytes: The most bytes of activations on each rank under a program, where they are known.
    """

    def __init__(
        self,
        on_event: Callable[[ControlEvent], None] | None,
        known: Callable[[int], Plan | None],
        activation_bytes: Callable[[Program], tuple[int, ...]] | None,
    ) -> None:
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
        """Keep an event and pass it on, with its plan's activation memory if that plan may run."""
        if event.kind in _WITH_MEMORY:
            plan = None if event.version in self._memory else self._known(event.version)
            if plan is not None:
                self.compute_memory(plan)
            in_flight, memory = self._memory.get(event.version, (None, None))
            event = replace(event, in_flight=in_flight, memory=memory)
        self._events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def compute_memory(self, plan: Plan) -> None:
        """Compute the activation memory of a plan before an event needs it. Results of the last few plans are remembered."""
        if self._activation_bytes is not None and plan.version not in self._memory:
            simulated = simulate if plan.program.is_one_pipeline else simulate_alike
            in_flight = simulated(plan.program, plan.case.cost).peak_in_flight
            self._memory[plan.version] = in_flight, self._activation_bytes(plan.program)
            for version in sorted(self._memory)[:-_KEPT_PLANS]:
                self._memory.pop(version, None)
