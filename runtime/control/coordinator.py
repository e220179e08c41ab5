"""The coordinator: the one rank that gathers measurements, plans beside training and proposes plans.

It runs on the control thread of its rank. Planning runs on a thread of its own, so that the plan log keeps growing. There is
one round at a time: detection → planning → proposal → confirmed by all, or withdrawn. A detection during a round starts the
next one, and a plan made for costs that have changed since is discarded.

A speculative round begins as soon as one step shows a change that the next may confirm. All ranks prepare for its proposal and
go on under the old plan. If the change is confirmed and the plan wins under the new costs, the next log entry names it. Another
round then looks for an even better plan. Otherwise the proposal is withdrawn.

Flap damping postpones a plan for the recovery of flapping edges until waiting has cost as much as a relapse would. Any
detection in the meantime discards it. If another edge has turned slow as well, a plan for that change alone runs until then.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from adaptra.errors import AdaptraError
from adaptra.planning.bandwidth_remedies import Remedies
from adaptra.program import Program
from adaptra.runtime.control.events import EventKind
from adaptra.runtime.control.participant import Emit, Participant
from adaptra.runtime.control.plan import Plan
from adaptra.runtime.control.plan_log import Agreement
from adaptra.runtime.control.replanning import Planning
from adaptra.runtime.control.yielding import yielding_gil
from adaptra.runtime.detection.changes import EdgeChange, LossChange, StageChange
from adaptra.runtime.detection.detector import Detection, Detector
from adaptra.runtime.detection.level_shift import DetectorOptions
from adaptra.runtime.detection.measurement import StepMeasurement
from adaptra.runtime.detection.speculation import Speculation
from adaptra.runtime.detection.step_noise import steps_until_sure
from adaptra.simulation.cost import CostModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Options of a controller.

    Attributes:
        adapt: Whether to switch plans. False measures, detects and predicts, and never switches.
        switch_gain: The fraction of the predicted makespan that a new plan must save to be worth a switch.
        delegate: Whether edges that turn slow take the delegate, and return once they have recovered.
        ahead: The number of steps by which the log exceeds the next step of the slowest rank. A switch takes effect that many
            steps after the last confirmation. A control round trip may take up to ``ahead`` steps without stalling training.
        confirm_seconds: A proposal that is not confirmed by all within this time is withdrawn with the next measurement.
        plan_seconds: The longest time that a rank waits for the log to cover its next step, seconds; None for no limit.
        patience: The seconds that a rank waits for that before it asks the coordinator. A coordinator that does not answer
            within the same time again is replaced.
        detector: The thresholds of a change.
    """

    adapt: bool = True
    switch_gain: float = 0.03
    delegate: bool = False
    ahead: int = 2
    confirm_seconds: float = 30.0
    plan_seconds: float | None = 300.0
    patience: float = 2.5
    detector: DetectorOptions = field(default_factory=DetectorOptions)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of planning for ``detection``: a plan without a version yet, or none, or the error; and the bandwidth
    remedies.

    If flap damping postpones the plan, ``meanwhile`` is a plan that may run at once, if any gains enough. ``same`` is the
    running plan if its receives have to be posted sooner, for the case that no plan gains enough.
    """

    detection: Detection
    before: float | None = None
    plan: Plan | None = None
    meanwhile: Plan | None = None
    same: Plan | None = None
    error: Exception | None = None
    remedies: Remedies | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A plan that is proposed after a step in place of ``running``, if nothing else is detected before."""

    plan: Plan
    before: float
    step: int
    running: Program


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


class Coordinator:
    """The coordinator's part of the controller. All methods run on the control thread, except for the planning itself.

    Args:
        ranks: The number of ranks of the pipeline.
        participant: The coordinating rank's part in the agreement.
        current: The plan that runs; detection starts from its costs.
        planning: The compiler.
        options: The controller's options.
        emit: Emits events.
        wake: Has :meth:`woken` called on the control thread. Any thread may call it.
    """

    def __init__(
        self,
        ranks: int,
        participant: Participant,
        current: Plan,
        planning: Planning,
        options: ControllerOptions,
        emit: Emit,
        wake: Callable[[], None],
    ) -> None:
        self._ranks = ranks
        self._participant = participant
        self._planning = planning
        self._options = options
        self._emit = emit
        self._wake = wake
        self._detector = Detector(current.case.cost, options.detector)
        self._gathered: dict[int, dict[int, StepMeasurement]] = {}
        self._wanted: Detection | None = None
        self._foresight = Speculation()
        self._foreseen: Detection | None = None
        self._waiting: _Waiting | None = None
        self._observed = -1
        self._suggested: tuple[Program, str] | None = None
        self._thread: threading.Thread | None = None
        self._outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        self._deadline = 0.0

    @property
    def cost(self) -> CostModel:
        """The measured cost model."""
        return self._detector.cost

    def measured(self, measurement: StepMeasurement) -> None:
        """Take the measurement of a step by one rank."""
        step = self._gathered.setdefault(measurement.step, {})
        step[measurement.rank] = measurement
        if len(step) == self._ranks:
            # Mail about earlier steps was lost: every rank reports its steps in order.
            self._gathered = {later: found for later, found in self._gathered.items() if later > measurement.step}
            self._observe(measurement.step, list(step.values()))
        agreement = self._participant.agreement
        if agreement is not None and agreement.proposal and agreement.missing and time.monotonic() > self._deadline:
            missing = ", ".join(map(str, agreement.missing))
            why = f"not confirmed by rank {missing} within {self._options.confirm_seconds} s"
            self._participant.withdraw(agreement.proposal.version, why)

    def suggest(self, program: Program, reason: str) -> None:
        """Propose a program in the next round, even if it gains nothing."""
        self._suggested = program, reason

    def woken(self) -> None:
        """Take the outcome of planning that has ended.

        Raises:
            Exception: An error of the planner, unless it is an AdaptraError.
        """
        while not self._outcomes.empty():
            outcome = self._outcomes.get()
            self._thread = None
            if outcome.error is not None and not isinstance(outcome.error, AdaptraError):
                raise outcome.error
            if outcome.detection is self._foreseen:
                self._conclude_ahead(outcome)
            elif self._wanted is None:
                self._conclude(outcome)

    def begin_round(self) -> None:
        """Begin the next proposal or planning, unless a round is under way."""
        agreement = self._participant.agreement
        if self._thread is not None or agreement is None or agreement.proposal is not None or agreement.current is None:
            return
        current = agreement.current
        if self._suggested is not None:
            (program, reason), self._suggested = self._suggested, None
            before = self._planning.predict(current.program, current.case.cost)
            predicted = self._planning.predict(program, current.case.cost)
            self._propose(replace(current, program=program, predicted=predicted, reason=reason), before)
        elif self._wanted is not None:
            detection, self._wanted = self._wanted, None
            self._begin_planning(detection, current, is_draft=False)
        elif (suspicion := self._foresight.suspicion) is not None and suspicion is not self._foreseen:
            self._foreseen = suspicion
            self._begin_planning(suspicion, current, is_draft=True)
        elif self._waiting is not None and self._observed >= self._waiting.step:
            waiting, self._waiting = self._waiting, None
            if waiting.running == current.program and self._still_wins(waiting.plan, current):
                self._propose(waiting.plan, waiting.before)

    def close(self, timeout: float) -> None:
        """Wait for planning that is under way, at most ``timeout`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _observe(self, step: int, measurements: list[StepMeasurement]) -> None:
        detection = self._detector.observe(measurements)
        self._observed = step
        agreement = self._participant.agreement
        if agreement is None or agreement.current is None:
            return
        if detection is not None:
            self._emit(EventKind.DETECTED, step, agreement.current.version, detection.reason)
            self._wanted, self._waiting = detection, None
            self._foresight.confirm()
        if self._options.adapt:
            with yielding_gil():
                self._foresight.suspect(step, self._detector.foresee(measurements))
        if agreement.is_held and self._foresight.suspicion is not self._foreseen:
            self._settle_held(agreement, agreement.current)

    def _settle_held(self, agreement: Agreement, current: Plan) -> None:
        """Release or withdraw the speculative proposal, because its suspicion was confirmed or dropped."""
        proposal = agreement.proposal
        assert proposal is not None, "a held proposal is one"
        if self._wanted is not None and self._is_for(proposal, current, self._wanted):
            self._participant.release()
        else:
            self._participant.withdraw(proposal.version, "what was suspected did not come true")

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
        patience = self._patience(program, current.program, detection, before - predicted)
        return self._is_gain(predicted, before) and patience == 0.0

    def _still_wins(self, plan: Plan, current: Plan) -> bool:
        """Return True if a postponed plan still gains enough under the costs of the steps since then."""
        if (plan.delegated, plan.rounded) != (current.delegated, current.rounded):
            return True  # those steps don't show edges whose messages would take the delegate or round
        predict, latest = self._planning.predict, self._detector.latest
        return self._is_gain(predict(plan.program, latest), predict(current.program, latest))

    def _patience(self, program: Program, running: Program, detection: Detection, gain: float) -> float:
        """Return the steps from its detection for which a program is postponed: by flap damping, or until its gain exceeds the
        noise.

        ``gain``, in seconds per step, is that of the whole plan, whose messages may also take the delegate or round.
        """
        return max(self._planning.patience(program, running, detection), steps_until_sure(gain, detection.noise))

    def _is_gain(self, predicted: float, before: float, rounds_less: bool = False) -> bool:
        """Return True if a plan saves enough of a step. Fewer rounded edges are worth as much as a switch has to gain."""
        least = -self._options.switch_gain if rounds_less else self._options.switch_gain
        return predicted < (1 - least) * before

    def _begin_planning(self, detection: Detection, current: Plan, is_draft: bool) -> None:
        given = detection, current, is_draft
        self._thread = threading.Thread(target=self._plan, args=given, name="adaptra-planner", daemon=True)
        self._thread.start()

    def _plan(self, detection: Detection, current: Plan, is_draft: bool) -> None:
        """Plan on the planning thread, and pass the outcome to the control thread in any case."""
        try:
            with yielding_gil():
                outcome = self._compare(detection, current, is_draft)
        except Exception as error:
            outcome = _Outcome(detection, error=error)
        self._outcomes.put(outcome)
        self._wake()

    def _compare(self, detection: Detection, current: Plan, is_draft: bool) -> _Outcome:
        before = self._planning.expect(current.program, detection)
        if not self._options.adapt:
            return _Outcome(detection, before)
        delegated = _delegated(current, detection) if self._options.delegate else current.delegated
        plan, remedies = self._planning.plan_for(detection, current, delegated, is_draft)
        other = self._planning.meanwhile(plan.program, current.program, current.case, detection)
        meanwhile = other and replace(plan, program=other, predicted=self._planning.expect(other, detection))
        if meanwhile is not None and (
            not self._is_gain(meanwhile.predicted, before) or steps_until_sure(before - meanwhile.predicted, detection.noise)
        ):
            meanwhile = None
        same = self._planning.lowered_anew(current, detection)
        return _Outcome(detection, before, plan, meanwhile, same, remedies=remedies)

    def _conclude(self, outcome: _Outcome) -> None:
        agreement = self._participant.agreement
        if agreement is None or agreement.current is None:
            return
        current, step = agreement.current, agreement.slowest
        before, plan = outcome.before, outcome.plan
        if outcome.remedies is not None:
            self._emit(EventKind.LIMITED, step, current.version, str(outcome.remedies))
        if outcome.error is not None:
            self._emit(EventKind.KEPT, step, current.version, f"no other plan: {outcome.error}")
        elif plan is None or before is None:
            self._emit(EventKind.KEPT, step, current.version, "switching plans is turned off", before, before)
        elif not self._is_gain(plan.predicted, before, rounds_less=(rounds_less := set(plan.rounded) < set(current.rounded))):
            text = f"the best plan found takes {1e3 * plan.predicted:.1f} ms, the running one {1e3 * before:.1f} ms"
            self._emit(EventKind.KEPT, step, current.version, text, before, before)
            if outcome.same is not None:
                self._propose(outcome.same, before)
        elif outcome.meanwhile is not None:
            self._wait(plan, outcome.meanwhile, outcome.meanwhile.predicted, outcome.detection, rounds_less)
            self._propose(outcome.meanwhile, before)
        elif not self._wait(plan, current, before, outcome.detection, rounds_less):
            self._propose(plan, before)

    def _wait(self, plan: Plan, running: Plan, before: float, detection: Detection, rounds_less: bool) -> bool:
        """Postpone ``plan`` for flap damping or until its gain is certain. Until then steps take ``before`` seconds.

        Returns:
            True if the plan is postponed.
        """
        gain = math.inf if rounds_less else before - plan.predicted  # exact messages are a gain without seconds
        patience = math.ceil(self._patience(plan.program, running.program, detection, gain))
        if patience > 0 and self._is_gain(plan.predicted, before):
            change = f"{1e3 * plan.predicted:.1f} ms instead of {1e3 * before:.1f} ms"
            if self._planning.patience(plan.program, running.program, detection):
                text = f"what flaps may turn slow again: {change} are worth that {patience} steps after step {detection.step}"
            else:
                noise = f"steps scatter by {1e3 * detection.noise:.1f} ms"
                text = f"{noise}: {change} are beyond that {patience} steps after step {detection.step}"
            self._emit(EventKind.KEPT, self._observed, running.version, text, before, before)
            self._waiting = _Waiting(plan, before, detection.step + patience, running.program)
        return patience > 0

    def _conclude_ahead(self, outcome: _Outcome) -> None:
        """Propose a speculative plan: pending while its change is suspected, at once if the change has been detected
        meanwhile.
        """
        agreement = self._participant.agreement
        if agreement is None or agreement.current is None or outcome.plan is None or outcome.before is None:
            return
        plan = outcome.meanwhile or outcome.plan
        if plan.rounded != agreement.current.rounded:
            return  # its time depends on which edges round, and that is decided only for confirmed changes
        if self._foresight.suspicion is outcome.detection:
            if self._wins(plan.program, agreement.current, outcome.detection):
                self._propose(plan, outcome.before, is_held=True)
            elif outcome.same is not None:
                self._propose(outcome.same, outcome.before, is_held=True)
        elif self._wanted is not None and self._wins(plan.program, agreement.current, self._wanted):
            self._propose(plan, outcome.before)

    def _propose(self, plan: Plan, before: float, is_held: bool = False) -> None:
        self._deadline = time.monotonic() + self._options.confirm_seconds
        text = f"{plan.reason}; {1e3 * plan.predicted:.1f} ms instead of {1e3 * before:.1f} ms"
        self._participant.propose(plan, before, f"in case of {text}" if is_held else text, is_held)
