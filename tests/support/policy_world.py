"""A policy beside a pipeline whose steps are only measured: no ranks, no threads, no store, no clock.

All ranks confirm a proposal at once, unless the test says otherwise. The log is one step ahead, as far as a plan has to be
known for training to go on. Planning takes a number of steps; with none its outcome is there before the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adaptra.runtime.control.deciding.policy import (
    Action,
    BeginPlanning,
    ControllerOptions,
    PlanningOutcome,
    Policy,
    Propose,
    Release,
    Withdraw,
)
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.control.plans.plan_log import Agreement
from adaptra.runtime.measuring.measurement import StepMeasurement

SECONDS = 0.5
"""Of a step, as the policy's clock says."""


class PolicyWorld:
    """One policy and what it brings about.

    Args:
        initial: The plan that all ranks have confirmed.
        ranks: How many ranks report each step.
        planning: The compiler.
        options: The controller's.
        planning_steps: How many steps planning takes.
        confirming: The ranks that confirm a proposal; by default all of them.
    """

    def __init__(
        self,
        initial: Plan,
        ranks: int,
        planning: Planning,
        options: ControllerOptions | None = None,
        *,
        planning_steps: int = 0,
        confirming: Sequence[int] | None = None,
    ) -> None:
        self.policy = Policy(0, ranks, initial, planning, options or ControllerOptions())
        self.agreement = Agreement(ranks, ahead=1)
        self.actions: list[Action] = []
        self.now = 0.0
        self._planning_steps = planning_steps
        self._confirming = range(ranks) if confirming is None else confirming
        self._outcomes: list[tuple[int, PlanningOutcome]] = []
        self._versions = initial.version
        self._step = 0
        self.agreement.propose(initial)
        for rank in range(ranks):
            self.agreement.confirm(rank, initial.version, initial.digest)
        self.agreement.advance()
        self.plan = initial
        """What the next step runs."""

    def events(self, *kinds: EventKind) -> list[ControlEvent]:
        """The events so far, of some kinds."""
        return [one for one in self.actions if isinstance(one, ControlEvent) and one.kind in kinds]

    def step(self, measurements: Sequence[StepMeasurement]) -> Plan:
        """Let all ranks report a step; the plan of the next one."""
        self.now += SECONDS
        for measurement in measurements:
            self._carry_out(self.policy.observe(measurement, self.agreement, self.now))
            self.agreement.report(measurement.rank, measurement.step)
            if self.agreement.advance() is not None and self.agreement.current is not None:
                self.plan = self.agreement.current
            self._carry_out(self.policy.begin_round(self.agreement, self.now))
        self._step += 1
        while self._outcomes and self._outcomes[0][0] <= self._step:
            self._conclude(self._outcomes.pop(0)[1])
        return self.plan

    def _conclude(self, outcome: PlanningOutcome) -> None:
        self._carry_out(self.policy.conclude(outcome, self.agreement, self.now))
        self._carry_out(self.policy.begin_round(self.agreement, self.now))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self.actions.append(action)
            match action:
                case BeginPlanning():
                    self._outcomes.append((self._step + self._planning_steps, self.policy.plan(action)))
                case Propose(plan):
                    self._versions += 1
                    plan = replace(plan, version=self._versions)
                    self.agreement.propose(plan, action.is_speculative)
                    for rank in self._confirming:
                        self.agreement.confirm(rank, plan.version, plan.digest)
                case Release():
                    self.agreement.release()
                case Withdraw():
                    self.agreement.withdraw()
                case ControlEvent():
                    pass
