"""What the control plane calls in the process of its rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adaptra.runtime.control.plans.events import ControlEvent
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.measuring.reduces import StepReduces


@dataclass(frozen=True, slots=True)
class ControlCallbacks:
    """What a controller calls in its process.

    Attributes:
        prepare: Called with a proposed plan before it is confirmed, one at a time on a thread of its own, to prepare a switch.
            An exception that it raises refuses the plan.
        on_event: Called with each event by the thread on which it happens: the training thread for SWITCHED, else mostly the
            control thread.
        on_reduces: Called on the control thread while this rank coordinates, with REDUCE of each step on all ranks.
        on_error: Called on the control thread with the error that ends the control plane.
    """

    prepare: Callable[[Plan], None] | None = None
    on_event: Callable[[ControlEvent], None] | None = None
    on_reduces: Callable[[StepReduces], None] | None = None
    on_error: Callable[[Exception], None] | None = None
