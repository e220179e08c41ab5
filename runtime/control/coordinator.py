"""The coordinator: the one rank that gathers measurements, plans beside training and proposes plans.

It runs on the control thread of its rank, and carries out what its
:class:`adaptra.runtime.control.deciding.policy.Policy` decides.
Planning runs on a thread of its own, so that the plan log keeps growing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from adaptra.program import Program
from adaptra.runtime.control.agreement.participant import Participant
from adaptra.runtime.control.deciding.policy import Action, BeginPlanning, PlanningOutcome, Policy, Propose, Release, Withdraw
from adaptra.runtime.control.plans.events import ControlEvent
from adaptra.runtime.control.plans.plan_log import Agreement
from adaptra.runtime.measuring.measurement import StepMeasurement
from adaptra.runtime.measuring.reduces import ReduceTracker, StepReduces
from adaptra.simulation.cost import CostModel


class Coordinator:
    """The coordinator's part of the controller. All methods run on the control thread, except for the planning itself.

    Args:
        participant: The coordinating rank's part in the agreement.
        policy: Decides what to do.
        reduces: Gathers REDUCE of each step on all ranks.
        emit: Emits events.
        on_reduces: Called with REDUCE of each step, or None.
        wake: Has :meth:`woken` called on the control thread. Any thread may call it.
    """

    def __init__(
        self,
        participant: Participant,
        policy: Policy,
        reduces: ReduceTracker,
        emit: Callable[[ControlEvent], None],
        on_reduces: Callable[[StepReduces], None] | None,
        wake: Callable[[], None],
    ) -> None:
        self._participant = participant
        self._policy = policy
        self._reduces = reduces
        self._emit = emit
        self._on_reduces = on_reduces
        self._wake = wake
        self._thread: threading.Thread | None = None
        self._outcomes: SimpleQueue[PlanningOutcome | Exception] = SimpleQueue()

    @property
    def cost(self) -> CostModel:
        """The measured cost model."""
        return self._policy.cost

    def measured(self, measurement: StepMeasurement) -> None:
        """Take the measurement of a step by one rank."""
        self._decide(partial(self._policy.observe, measurement))
        reduces = self._reduces.observe(measurement)
        if reduces is not None and self._on_reduces is not None:
            self._on_reduces(reduces)

    def suggest(self, program: Program, reason: str) -> None:
        """Propose a program in the next round, even if it gains nothing."""
        self._policy.suggest(program, reason)

    def woken(self) -> None:
        """Take the outcome of planning that has ended.

        Raises:
            Exception: An error of the planner, unless it is an AdaptraError.
        """
        while not self._outcomes.empty():
            outcome = self._outcomes.get()
            self._thread = None
            if isinstance(outcome, Exception):
                raise outcome
            self._decide(partial(self._policy.conclude, outcome))

    def begin_round(self) -> None:
        """Begin the next proposal or planning, unless a round is under way."""
        self._decide(self._policy.begin_round)

    def close(self, timeout: float) -> None:
        """Wait for planning that is under way, at most ``timeout`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _decide(self, decide: Callable[[Agreement, float], list[Action]]) -> None:
        """Carry out what the policy decides now."""
        agreement = self._participant.agreement
        for action in [] if agreement is None else decide(agreement, time.monotonic()):
            match action:
                case BeginPlanning():
                    self._thread = threading.Thread(target=self._plan, args=(action,), name="adaptra-planner", daemon=True)
                    self._thread.start()
                case Propose(plan, before, text, is_speculative):
                    self._participant.propose(plan, before, text, is_speculative)
                case Release():
                    self._participant.release()
                case Withdraw(version, why):
                    self._participant.withdraw(version, why)
                case ControlEvent():
                    self._emit(action)

    def _plan(self, begin: BeginPlanning) -> None:
        """Plan on the planning thread, and pass the outcome to the control thread in any case."""
        outcome: PlanningOutcome | Exception
        try:
            outcome = self._policy.plan(begin)
        except Exception as error:
            outcome = error
        self._outcomes.put(outcome)
        self._wake()
