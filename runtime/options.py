"""How the runtime of a pipeline behaves: what few users change, kept out of compile()'s own arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adaptra.program import Program
from adaptra.runtime.emulation import EmulatedDevice


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a pipeline's runtime.

    Attributes:
        adapt: Re-plan when a link or a stage turns slow. False measures and reports, and never switches.
        schedule: The program to start with: a generator's name such as ``"1f1b"``, a compute-only Program, or None for the
            plan adapted to the estimated costs.
        seed: Seed of the random numbers of dropout and its like; they depend on it, the step and the microbatch alone.
        timeout: Seconds an op waits for a message, and a step for its plan, before the step fails.
        faults: Faults to inject, such as ``"delay 1-2 60ms @8"``: see :mod:`adaptra.runtime.faults`.
        emulate: Pad every op to a stated duration by sleeping, to see the timeline of devices this machine doesn't have.
        on_event: Called with each event of the controller, such as a detected slow edge or a switch of plans.
    """

    adapt: bool = True
    schedule: str | Program | None = None
    seed: int = 0
    timeout: float = 300.0
    faults: Sequence[str] = ()
    emulate: EmulatedDevice | None = None
    on_event: Callable[[Any], None] | None = None
