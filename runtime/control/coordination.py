"""This rank's turn to coordinate: it begins and ends as the agreement says, and is given up after a failure."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch.distributed import DistError

from adaptra.program import Program
from adaptra.runtime.control.agreeing_ranks import AgreeingRanks
from adaptra.runtime.control.agreement.participant import Participant
from adaptra.runtime.control.coordinator import Coordinator
from adaptra.runtime.control.deciding.policy import ControllerOptions, Policy
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.control.event_recorder import EventRecorder
from adaptra.runtime.control.mail.hub import MailHub
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.measuring.reduces import ReduceTracker, StepReduces
from adaptra.simulation.cost import CostModel

log = logging.getLogger(__name__)


class Coordination:
    """The coordinator of this rank while it coordinates. Unless said otherwise, only the control thread uses it.

    Args:
        participant: This rank's part in the agreement.
        ranks: The ranks that agree.
        initial: Plan 0.
        planning: The compiler.
        options: The coordinating rank's options.
        recorder: Records events.
        hub: Its thread runs the coordinator.
        on_reduces: Called with REDUCE of each step on all ranks, or None.
    """

    def __init__(
        self,
        participant: Participant,
        ranks: AgreeingRanks,
        initial: Plan,
        planning: Planning,
        options: ControllerOptions,
        recorder: EventRecorder,
        hub: MailHub,
        on_reduces: Callable[[StepReduces], None] | None,
    ) -> None:
        self._participant = participant
        self._ranks = ranks
        self._initial = initial
        self._planning = planning
        self._options = options
        self._recorder = recorder
        self._hub = hub
        self._on_reduces = on_reduces
        self._coordinator: Coordinator | None = None
        self._has_resigned = False

    @property
    def is_here(self) -> bool:
        """True while this rank coordinates. Any thread may ask."""
        return self._coordinator is not None

    @property
    def cost(self) -> CostModel | None:
        """The measured costs; None unless this rank coordinates. Any thread may ask."""
        coordinator = self._coordinator
        return None if coordinator is None else coordinator.cost

    def lead(self, leads: bool) -> None:
        """Begin or end to coordinate. The outcome of planning that is under way is then ignored."""
        self._coordinator = None
        agreement = self._participant.agreement
        if leads and agreement is not None:
            running = agreement.current or self._initial
            policy = Policy(self._ranks.rank, self._ranks.count, running, self._planning, self._options)
            tracker = ReduceTracker(self._ranks.place, self._ranks.pipeline)
            self._coordinator = Coordinator(
                self._participant, policy, tracker, self._recorder.emit, self._on_reduces, self._hub.mailbox.wake
            )

    def act(self, run: Callable[[Coordinator], None]) -> None:
        """Run the coordinator's part. The first failure hands coordination to another rank, and a second one is raised."""
        if self._coordinator is None or self._hub.is_closing:
            return
        try:
            run(self._coordinator)
        except DistError:
            raise
        except Exception as error:
            if self._has_resigned:
                raise
            self._has_resigned = True
            log.exception("rank %d: coordinating failed, another rank takes over", self._ranks.rank)
            self._recorder.emit_now(EventKind.RESIGNED, f"{type(error).__name__}: {error}")
            self._participant.resign()

    def suggest(self, program: Program, reason: str) -> None:
        """Have a program proposed in the next round; nothing happens unless this rank coordinates."""
        if self._coordinator is not None:
            self._coordinator.suggest(program, reason)

    def close(self, timeout: float) -> None:
        """Wait for planning that is under way, at most ``timeout`` seconds. The training thread calls it."""
        if (coordinator := self._coordinator) is not None:
            coordinator.close(timeout)
