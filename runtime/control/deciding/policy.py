"""The coordinator's decisions: when to plan, and when to propose, release or withdraw a plan.

A policy has no thread, clock or store, so a simulator can step thousands of them. It takes measurements of steps and outcomes
of planning, and returns actions. The caller carries the actions out in their order before it calls again.
``tests/runtime/control/test_policy.py`` steps it through slow and flapping edges.

There is one round at a time: detection → planning → proposal → confirmed by all, or withdrawn. A detection during a round
starts the next one, and a plan made for costs that have changed since is discarded.

A speculative round begins as soon as one step shows a change that the next may confirm. All ranks prepare for its proposal and
go on under the old plan. If the change is confirmed and the plan wins under the new costs, the next log entry names it. Another
round then looks for an even better plan. Otherwise the proposal is withdrawn.

Flap damping postpones a plan for the recovery of flapping edges, for longer after each relapse. A plan whose gain may still be
noise is postponed as well. Any detection in the meantime discards it.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Final

from adaptra.errors import AdaptraError
from adaptra.planning.remedies.bandwidth_remedies import Remedies
from adaptra.program import Program
from adaptra.runtime.control.deciding.replanning import Planning, step_seconds
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.control.plans.plan_log import Agreement
from adaptra.runtime.detection.changes import EdgeChange, LossChange, StageChange
from adaptra.runtime.detection.detector import Detection
from adaptra.runtime.detection.job_detector import JobDetector
from adaptra.runtime.detection.level_shift import DetectorOptions
from adaptra.runtime.detection.meetings import Meetings
from adaptra.runtime.detection.speculation import Speculation
from adaptra.runtime.detection.step_noise import steps_until_sure
from adaptra.runtime.measuring.measurement import StepMeasurement
from adaptra.simulation.cost import CostModel
from adaptra.unlike_numbers import instead_of, milliseconds_apart

REVIEW: Final = 16
"""The number of steps between two looks at whether microbatches that are away from home still gain by it."""

NOTHING_GAINED: Final = 0.01
"""The fraction of a step that microbatches away from home have to gain, to stay there."""


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Options of a controller.

    Attributes:
        adapt: Whether to switch plans. False measures, detects and predicts, and never switches.
        switch_gain: The fraction of a step's predicted seconds that a new plan must save to be worth a switch.
        delegate: Whether edges that turn slow take the delegate, and return once they have recovered.
        ahead: The number of steps by which the log exceeds the next step of the slowest rank. A switch takes effect that many
            steps after the last confirmation. A control round trip may take up to ``ahead`` steps without stalling training.
        confirm_seconds: A proposal that is not confirmed by all within this time is withdrawn with the next measurement.
        plan_seconds: The longest time that a rank waits for the log to cover its next step, seconds; None for no limit.
        answer_seconds: The time that a rank waits for that before it asks the coordinator. A coordinator that does not answer
            within the same time again is replaced.
        detector: The thresholds of a change.
    """

    adapt: bool = True
    switch_gain: float = 0.03
    delegate: bool = False
    ahead: int = 2
    confirm_seconds: float = 30.0
    plan_seconds: float | None = 300.0
    answer_seconds: float = 2.5
    detector: DetectorOptions = field(default_factory=DetectorOptions)


@dataclass(frozen=True, slots=True)
class BeginPlanning:
    """The action of planning beside training: call :meth:`Policy.plan`, and give its outcome to :meth:`Policy.conclude`.

    A draft is for a suspicion, and is searched for a shorter time.
    """

    detection: Detection
    current: Plan
    is_draft: bool


@dataclass(frozen=True, slots=True)
class Propose:
    """The action of proposing a plan; see :meth:`adaptra.runtime.control.agreement.participant.Participant.propose`."""

    plan: Plan
    before: float
    text: str
    is_speculative: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """The action of accepting the speculative proposal, because its suspicion was confirmed."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The action of withdrawing the pending proposal."""

    version: int
    why: str


Action = BeginPlanning | Propose | Release | Withdraw | ControlEvent
"""What a policy asks for. An event is to be emitted."""


@dataclass(frozen=True, slots=True)
class PlanningOutcome:
    """The outcome of planning for ``detection``: a plan without a version yet, or none, or the error; and the bandwidth
    remedies.

    ``before`` are the seconds of a step of the running plan under the detected costs. ``same`` is for the
    case that no plan gains enough. It is the running plan if its receives come sooner or edges take or leave the delegate.
    """

    detection: Detection
    before: float | None = None
    plan: Plan | None = None
    same: Plan | None = None
    error: AdaptraError | None = None
    remedies: Remedies | None = None


@dataclass(frozen=True, slots=True)
class _Postponed:
    """A plan for ``detection`` that is proposed after a step in place of ``running``, if nothing else is detected before."""

    plan: Plan
    before: float
    step: int
    running: Program
    detection: Detection


def _delegated(current: Plan, detection: Detection) -> tuple[tuple[int, int], ...]:
    """Return the edges for the delegate: the present ones and those that turned slow, without those that have recovered."""
    edges = set(current.delegated)
    for change in detection.changes:
        match change:
            case EdgeChange() | LossChange() if change.is_healed:
                edges.discard((change.source, change.destination))
            case EdgeChange() if change.is_slower:
                edges.add((change.source, change.destination))
            case LossChange():
                edges.add((change.source, change.destination))
            case EdgeChange() | StageChange():
                pass
    return tuple(sorted(edges))


def _added_flight(detection: Detection, edges: Container[tuple[int, int]]) -> float:
    """Return by how many seconds a message over one of these edges takes longer; infinite where no single change tells."""
    changes = (change for change in detection.changes if isinstance(change, EdgeChange))
    added = (change.now - change.was for change in changes if (change.source, change.destination) in edges)
    return max(added, default=math.inf)


def _steps_to_wait(detection: Detection, gain: float) -> int:
    """Return the steps from its detection for which a plan is postponed.

    Flap damping postpones it, and noise does until the gain exceeds it. ``gain`` is in seconds per step.
    """
    return max(detection.hold_off, steps_until_sure(gain, detection.noise))


def _why_postponed(detection: Detection, plan: Plan, before: float) -> str:
    change = f"a plan of {instead_of(plan.predicted, before)} waits until"
    if detection.hold_off:
        return f"a flapping edge or stage may turn slow again: {change}"
    return f"steps scatter by {1e3 * detection.noise:.1f} ms: {change}"


class Policy:
    """The decisions of a coordinator, from step to step.

    The caller keeps the agreement, and gives it to every call. ``now`` is the time of any steady clock, in seconds.

    Args:
        rank: The coordinating rank, which events name.
        ranks: The number of ranks that are planned together: of the pipeline, or of all replicas.
        current: The plan that runs; detection starts from its costs.
        planning: The compiler.
        options: The controller's options.
    """

    def __init__(self, rank: int, ranks: int, current: Plan, planning: Planning, options: ControllerOptions) -> None:
        self._rank = rank
        self._ranks = ranks
        self._planning = planning
        self._options = options
        workers = ranks // planning.replicas
        self._detector = JobDetector(current.case.cost, planning.replicas, workers, options.detector)
        self._gathered: dict[int, dict[int, StepMeasurement]] = {}
        self._observed = -1
        self._meetings = Meetings()
        self._speculation = Speculation()
        self._unplanned: Detection | None = None
        self._undecided: Detection | None = None
        self._suggested: tuple[Program, str] | None = None
        self._postponed: _Postponed | None = None
        self._home: Program | None = None
        self._reviewed = -1
        self._is_planning = False
        self._deadline = 0.0

    @property
    def cost(self) -> CostModel:
        """The measured cost model."""
        return self._detector.cost

    def observe(self, measurement: StepMeasurement, agreement: Agreement, now: float) -> list[Action]:
        """Take the measurement of a step by one rank."""
        actions: list[Action] = []
        step = self._gathered.setdefault(measurement.step, {})
        step[measurement.rank] = measurement
        if len(step) == self._ranks:
            # Mail about earlier steps was lost: every rank reports its steps in order.
            self._gathered = {later: found for later, found in self._gathered.items() if later > measurement.step}
            actions = self._detect(measurement.step, list(step.values()), agreement)
        is_withdrawn = any(isinstance(action, Withdraw) for action in actions)
        if agreement.proposal and now > self._deadline and agreement.missing and not is_withdrawn:
            missing = ", ".join(map(str, agreement.missing))
            why = f"not confirmed by rank {missing} within {self._options.confirm_seconds} s"
            actions.append(Withdraw(agreement.proposal.version, why))
        return actions

    def suggest(self, program: Program, reason: str) -> None:
        """Propose a program in the next round, even if it gains nothing."""
        self._suggested = program, reason

    def plan(self, begin: BeginPlanning) -> PlanningOutcome:
        """Plan, and compare the plan with the running one. Any thread may call it: it neither reads nor changes the state."""
        try:
            return self._compare(begin.detection, begin.current, begin.is_draft)
        except AdaptraError as error:
            return PlanningOutcome(begin.detection, error=error)

    def conclude(self, outcome: PlanningOutcome, agreement: Agreement, now: float) -> list[Action]:
        """Take the outcome of the planning that was begun last."""
        self._is_planning = False
        current = agreement.current
        if current is None:
            return []
        if outcome.detection is self._speculation.drafted:
            return self._conclude_draft(outcome, current, now)
        return self._conclude(outcome, current, agreement.slowest, now) if self._unplanned is None else []

    def begin_round(self, agreement: Agreement, now: float) -> list[Action]:
        """Begin the next proposal or planning, unless a round is under way."""
        current = agreement.current
        if self._is_planning or agreement.proposal is not None or current is None:
            return []
        if self._suggested is not None:
            (program, reason), self._suggested = self._suggested, None
            case = current.case
            before, predicted = (step_seconds(one, case.cost, barrier=case.barrier) for one in (current.program, program))
            return [self._propose(replace(current, program=program, predicted=predicted, reason=reason), before, now)]
        if self._unplanned is not None:
            detection, self._unplanned = self._unplanned, None
            return [self._begin_planning(detection, current, is_draft=False)]
        if late := self._begin_late(current, now):
            return late
        if (suspicion := self._speculation.suspicion) is not None and suspicion is not self._speculation.drafted:
            self._speculation.drafted = suspicion
            return [self._begin_planning(suspicion, current, is_draft=True)]
        return []

    def _begin_late(self, current: Plan, now: float) -> list[Action]:
        """Propose a plan that has waited for long enough, or look at whether microbatches are away for nothing."""
        if self._postponed is not None and self._is_due(self._postponed):
            postponed, self._postponed, self._undecided = self._postponed, None, None
            if postponed.running == current.program and self._still_wins(postponed.plan, current):
                return [self._propose(postponed.plan, postponed.before, now)]
        elif self._postponed is None and (review := self._review(current)) is not None:
            return [self._begin_planning(review, current, is_draft=False)]
        return []

    def _is_due(self, postponed: _Postponed) -> bool:
        """Return True if a plan has waited for long enough.

        A host that was busy scatters steps for a while only, so the steps since the detection may be surer than those before.
        Once they are many they count alone, until then together with those before.
        """
        detection, waited = postponed.detection, self._observed - postponed.detection.step
        if self._observed >= postponed.step:
            return True
        if waited < detection.hold_off:
            return False
        options, gain = self._options.detector, postponed.before - postponed.plan.predicted
        noise = self._detector.noise_of(waited if waited >= options.window else options.memory)
        return steps_until_sure(gain, noise) <= waited

    def _review(self, current: Plan) -> Detection | None:
        """Return what the last steps measured, now and then, if microbatches are away from home and gain nothing by that.

        A plan that gave them back may have been dropped: it had to wait, and was less good in the one step that was asked.
        """
        if not current.is_routed:
            self._home = current.program
        if not current.is_routed or self._home is None or not self._options.adapt:
            self._reviewed = self._observed
            return None
        if self._observed < self._reviewed + REVIEW:
            return None
        self._reviewed = self._observed
        latest = replace(self._latest, step=self._observed, is_review=True)
        expect = self._planning.expect
        return latest if expect(self._home, latest) <= (1 + NOTHING_GAINED) * expect(current.program, latest) else None

    @property
    def _latest(self) -> Detection:
        """What the recent steps measured."""
        return replace(self._detector.latest, barrier=self._meetings.barrier)

    def _event(
        self, kind: EventKind, step: int, plan: Plan, text: str, predicted: float | None = None, before: float | None = None
    ) -> ControlEvent:
        return ControlEvent(kind, self._rank, step, plan.version, text, predicted, before)

    def _detect(self, step: int, measurements: list[StepMeasurement], agreement: Agreement) -> list[Action]:
        detection = self._detector.observe(measurements)
        self._observed = step
        has_turned = self._meetings.observe(step, measurements)
        current, actions = agreement.current, list[Action]()
        if current is None:
            return []
        if detection is None and has_turned and self._detector.is_calibrated:
            detection = replace(self._detector.latest, step=step)
        if detection is not None:
            barrier = self._meetings.barrier
            detection = replace(detection, barrier=barrier, barrier_is_new=barrier != current.case.barrier)
            actions.append(self._event(EventKind.DETECTED, step, current, detection.reason))
            self._unplanned = self._undecided = detection.after(self._undecided)
            self._postponed = None
            self._speculation.confirm()
        if self._options.adapt:
            suspicion = self._detector.foresee(measurements)
            known = None if suspicion is None else replace(suspicion, barrier=self._meetings.barrier)
            self._speculation.suspect(step, known)
        proposal = agreement.proposal
        if proposal is not None and agreement.is_speculative and self._speculation.suspicion is not self._speculation.drafted:
            actions.append(self._end_speculation(proposal, current))
        return actions

    def _end_speculation(self, proposal: Plan, current: Plan) -> Action:
        """Release or withdraw the speculative proposal, because its suspicion was confirmed or dropped."""
        if self._unplanned is not None and self._is_for(proposal, current, self._unplanned):
            return Release()
        return Withdraw(proposal.version, self._why_withdrawn())

    def _why_withdrawn(self) -> str:
        """Return what became of the suspicion: confirmed with another plan, replaced by another one, or nothing."""
        if self._unplanned is not None:
            return f"step {self._observed} shows what this plan no longer suits: {self._unplanned.reason}"
        if (suspicion := self._speculation.suspicion) is not None:
            return f"step {self._observed} makes another change likelier: {suspicion.reason}"
        return "what was suspected did not come true"

    def _is_for(self, proposal: Plan, current: Plan, detection: Detection) -> bool:
        """Return True if a speculative proposal suits the detection: another order that wins, or the same order lowered
        anew.
        """
        if proposal.program == current.program:
            return self._planning.lowered_anew(current, detection) is not None
        return self._wins(proposal.program, current, detection)

    def _wins(self, program: Program, current: Plan, detection: Detection) -> bool:
        """Return True if a program gains enough over the running plan under the detected costs and need not be postponed."""
        expect = self._planning.expect
        predicted, before = expect(program, detection), expect(current.program, detection)
        return self._is_gain(predicted, before) and _steps_to_wait(detection, before - predicted) == 0

    def _still_wins(self, plan: Plan, current: Plan) -> bool:
        """Return True if a postponed plan still gains enough under the costs of the steps since then."""
        if (plan.delegated, plan.rounded) != (current.delegated, current.rounded):
            return True  # those steps don't show edges whose messages would take the delegate or round
        expect, latest = self._planning.expect, self._latest
        before = expect(current.program, latest)
        return self._is_gain(expect(plan.program, latest), before, is_plainer=plan.is_plainer_than(current))

    def _is_gain(self, predicted: float, before: float, is_plainer: bool = False) -> bool:
        """Return True if a plan saves enough of a step. To be plainer is worth as much as a switch has to gain."""
        least = -self._options.switch_gain if is_plainer else self._options.switch_gain
        return predicted < (1 - least) * before

    def _begin_planning(self, detection: Detection, current: Plan, is_draft: bool) -> BeginPlanning:
        self._is_planning = True
        return BeginPlanning(detection, current, is_draft)

    def _compare(self, detection: Detection, current: Plan, is_draft: bool) -> PlanningOutcome:
        before = self._planning.expect(current.program, detection)
        if not self._options.adapt:
            return PlanningOutcome(detection, before)
        delegated = _delegated(current, detection) if self._options.delegate else current.delegated
        plan, remedies = self._planning.plan_for(detection, current, delegated, is_draft)
        same = self._planning.lowered_anew(current, detection, current.delegated if is_draft else delegated)
        return PlanningOutcome(detection, before, plan, same, remedies=remedies)

    def _conclude(self, outcome: PlanningOutcome, current: Plan, step: int, now: float) -> list[Action]:
        actions: list[Action] = []
        before, plan = outcome.before, outcome.plan
        self._undecided = None
        if outcome.remedies is not None:
            actions.append(self._event(EventKind.LIMITED, step, current, str(outcome.remedies)))
        if outcome.error is not None:
            actions.append(self._event(EventKind.KEPT, step, current, f"no other plan: {outcome.error}"))
        elif plan is None or before is None:
            actions.append(self._event(EventKind.KEPT, step, current, "switching plans is turned off", before, before))
        elif not self._is_gain(plan.predicted, before, is_plainer=(is_plainer := plan.is_plainer_than(current))):
            found, running = milliseconds_apart(plan.predicted, before)
            text = f"the best plan found takes {found}, the running one {running}"
            text = text if found != running else f"no plan is shorter than the running one's {running}"
            actions.append(self._event(EventKind.KEPT, step, current, text, before, before))
            if outcome.same is not None:
                actions += self._begin_same(outcome.same, outcome.detection, current, before, now)
        elif steps := _steps_to_wait(outcome.detection, math.inf if is_plainer else before - plan.predicted):
            actions.append(self._postpone(plan, outcome.detection, steps, current, before))
        else:
            actions.append(self._propose(plan, before, now))
        return actions

    def _begin_same(self, same: Plan, detection: Detection, current: Plan, before: float, now: float) -> list[Action]:
        """Propose the same order with receives or edges that change, once the edges can't be taken for noise or flap."""
        if same.delegated != current.delegated:
            taken = set(same.delegated) - set(current.delegated)
            if steps := _steps_to_wait(detection, _added_flight(detection, taken)):
                return [self._postpone(same, detection, steps, current, before)]
        return [self._propose(same, before, now)]

    def _postpone(self, plan: Plan, detection: Detection, steps: int, current: Plan, before: float) -> ControlEvent:
        self._postponed = _Postponed(plan, before, detection.step + steps, current.program, detection)
        self._undecided = detection
        text = f"{_why_postponed(detection, plan, before)} {steps} steps after step {detection.step}"
        return self._event(EventKind.KEPT, self._observed, current, text, before, before)

    def _conclude_draft(self, outcome: PlanningOutcome, current: Plan, now: float) -> list[Action]:
        """Propose a speculative plan: pending while its change is suspected, at once if the change has been detected
        meanwhile.
        """
        if outcome.plan is None or outcome.before is None:
            return []
        plan = outcome.plan
        if plan.rounded != current.rounded:
            return []  # its time depends on which edges round, and that is decided only for confirmed changes
        if self._speculation.suspicion is outcome.detection:
            if self._wins(plan.program, current, outcome.detection):
                return [self._propose(plan, outcome.before, now, is_speculative=True)]
            if outcome.same is not None:
                return [self._propose(outcome.same, outcome.before, now, is_speculative=True)]
        elif self._unplanned is not None and self._wins(plan.program, current, self._unplanned):
            return [self._propose(plan, outcome.before, now)]
        return []

    def _propose(self, plan: Plan, before: float, now: float, is_speculative: bool = False) -> Propose:
        self._deadline = now + self._options.confirm_seconds
        text = f"{plan.reason}; {instead_of(plan.predicted, before)}"
        planned = replace(plan, predicted_before=before)
        return Propose(planned, before, f"in case of {text}" if is_speculative else text, is_speculative)
