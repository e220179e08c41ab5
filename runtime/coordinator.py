"""The coordinator: the one rank that gathers measurements, plans beside training and writes the plan log.

It lives on the control thread of rank 0; planning runs on a thread of its own, so that the log keeps growing meanwhile. There
is one round at a time: detection → planning → proposal → all confirm, or withdrawn. What is detected during a round starts the
next one, and a plan made for costs that have changed since is thrown away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Protocol

from torch.distributed import DistError

from adaptra.cost import Case, CostModel
from adaptra.errors import AdaptraError, ControlError
from adaptra.program import Program
from adaptra.runtime.changes import EdgeChange, StageChange
from adaptra.runtime.detector import Detection, Detector
from adaptra.runtime.events import EventKind
from adaptra.runtime.level import DetectorOptions
from adaptra.runtime.mailbox import Confirmed, LogGrew, Mailbox, Measured, Proposed, Refused, Wake
from adaptra.runtime.measurement import StepMeasurement
from adaptra.runtime.plan import Plan
from adaptra.runtime.plan_log import Agreement, LogWriter

COORDINATOR = 0
"""The rank that coordinates."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """How a controller behaves.

    Attributes:
        adapt: Whether to switch plans. False measures, detects and predicts, and never switches.
        switch_gain: The part of the predicted makespan that a new plan must save to be worth a switch.
        delegate: Whether edges that turn slow take the delegate, and come back once they have healed.
        ahead: How many steps beyond the next step of the slowest rank the log covers. A switch takes effect so many steps after
            the last confirmation; the control plane has so many steps' time for a round trip before a rank waits for it.
        confirm_seconds: A proposal that is not confirmed by all within this time is withdrawn with the next measurement.
        plan_seconds: How long a rank waits at most for the log to cover its next step, or None.
        detector: What counts as a change.
    """

    adapt: bool = True
    switch_gain: float = 0.03
    delegate: bool = False
    ahead: int = 2
    confirm_seconds: float = 30.0
    plan_seconds: float | None = 300.0
    detector: DetectorOptions = field(default_factory=DetectorOptions)


@dataclass(frozen=True, slots=True)
class Planning:
    """The compiler, as the controller uses it.

    Attributes:
        planner: The best program for a case, given the one that runs now. May raise an AdaptraError: the old plan is then kept.
        predict: The makespan of a program under a cost model; seconds.
        bound: What no program can beat in a case; seconds.
    """

    planner: Callable[[Case, Program], Program]
    predict: Callable[[Program, CostModel], float]
    bound: Callable[[Case], float]


class Emit(Protocol):
    """How events are told; see :class:`adaptra.runtime.events.ControlEvent`."""

    def __call__(
        self,
        kind: EventKind,
        step: int,
        version: int,
        text: str,
        predicted: float | None = None,
        predicted_before: float | None = None,
    ) -> None:
        """Tell an event of this rank."""
        ...


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the planning thread found: a plan without a version yet, or none, or why it failed."""

    before: float | None = None
    plan: Plan | None = None
    error: Exception | None = None


def _delegated(current: Plan, detection: Detection) -> tuple[tuple[int, int], ...]:
    """The edges that should take the delegate: those that do already and those that turned slow, but none that healed."""
    edges = set(current.delegated)
    for change in detection.changes:
        match change:
            case EdgeChange() if change.is_healed:
                edges.discard((change.source, change.destination))
            case EdgeChange() if change.now > change.was:
                edges.add((change.source, change.destination))
            case EdgeChange() | StageChange():
                pass
    return tuple(sorted(edges))


class Coordinator:
    """The coordinator's part of the controller. All methods but the planning itself run on the control thread.

    Args:
        ranks: How many ranks the pipeline has.
        mailbox: The coordinator's mail.
        initial: Plan 0, which every rank has from the start and confirms like any other.
        planning: The compiler.
        options: How to behave.
        emit: Tells events.
        first_step: The first step that the ranks will run.
    """

    def __init__(
        self,
        ranks: int,
        mailbox: Mailbox,
        initial: Plan,
        planning: Planning,
        options: ControllerOptions,
        emit: Emit,
        first_step: int,
    ) -> None:
        self._ranks = ranks
        self._mailbox = mailbox
        self._planning = planning
        self._options = options
        self._emit = emit
        self._log = LogWriter(mailbox.store)
        self._agreement = Agreement(ranks, first_step, options.ahead)
        self._agreement.propose(initial)
        self._logged_version = initial.version
        self._next_version = initial.version + 1
        self._detector = Detector(initial.case.cost, options.detector)
        self._gathered: dict[int, dict[int, StepMeasurement]] = {}
        self._wanted: Detection | None = None
        self._thread: threading.Thread | None = None
        self._outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        self._deadline = 0.0
        self._before: float | None = None

    def measured(self, mail: Measured) -> None:
        """A rank has run a step.

        Raises:
            ControlError: The measurement can't be one of this pipeline.
        """
        measurement = mail.measurement
        self._check_rank(measurement.rank)
        self._agreement.report(measurement.rank, measurement.step)
        step = self._gathered.setdefault(measurement.step, {})
        step[measurement.rank] = measurement
        if len(step) == self._ranks:
            del self._gathered[measurement.step]
            self._observe(measurement.step, list(step.values()))
        proposal = self._agreement.proposal
        if proposal is not None and self._agreement.current is not None and time.monotonic() > self._deadline:
            missing = ", ".join(map(str, self._agreement.missing))
            self._withdraw(proposal, f"not confirmed by rank {missing} within {self._options.confirm_seconds} s")
        self._start_planning()
        self._advance()

    def confirmed(self, mail: Confirmed) -> None:
        """A rank has confirmed a plan.

        Raises:
            ControlError: The ranks start with different plans.
        """
        self._check_rank(mail.rank)
        proposal = self._agreement.proposal
        try:
            self._agreement.confirm(mail.rank, mail.version, mail.digest)
        except ControlError as error:
            if self._agreement.current is None or proposal is None:
                raise ControlError(f"{error}; every rank must compile the same program") from None
            self._withdraw(proposal, str(error))
        self._start_planning()
        self._advance()

    def refused(self, mail: Refused) -> None:
        """A rank has refused a plan."""
        self._check_rank(mail.rank)
        proposal = self._agreement.proposal
        if proposal is not None and proposal.version == mail.version:
            self._withdraw(proposal, f"refused by rank {mail.rank}: {mail.why}")
        self._start_planning()

    def woken(self) -> None:
        """Planning has ended.

        Raises:
            Exception: What the planner raised, unless it is an AdaptraError.
        """
        while not self._outcomes.empty():
            outcome = self._outcomes.get()
            self._thread = None
            if outcome.error is not None and not isinstance(outcome.error, AdaptraError):
                raise outcome.error
            if self._wanted is None:
                self._conclude(outcome)
        self._start_planning()
        self._advance()

    def close(self, timeout: float) -> None:
        """Wait for planning that is under way, at most ``timeout`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _check_rank(self, rank: int) -> None:
        if rank >= self._ranks:
            raise ControlError(f"mail of rank {rank}: expected ranks 0..{self._ranks - 1}")

    def _observe(self, step: int, measurements: list[StepMeasurement]) -> None:
        detection = self._detector.observe(measurements)
        if detection is not None:
            current = self._agreement.current
            assert current is not None, "steps run only after the first plan is agreed"
            self._emit(EventKind.DETECTED, step, current.version, detection.reason)
            self._wanted = detection

    def _start_planning(self) -> None:
        current = self._agreement.current
        if self._wanted is None or self._thread is not None or self._agreement.proposal is not None or current is None:
            return
        detection, self._wanted = self._wanted, None
        self._thread = threading.Thread(target=self._plan, args=(detection, current), name="adaptra-planner", daemon=True)
        self._thread.start()

    def _plan(self, detection: Detection, current: Plan) -> None:
        """On the planning thread: the outcome goes to the control thread, whatever it is."""
        try:
            outcome = self._compare(detection, current)
        except Exception as error:
            outcome = _Outcome(error=error)
        self._outcomes.put(outcome)
        try:
            self._mailbox.send(COORDINATOR, Wake())
        except DistError as error:
            # The control thread meets the lost store by itself and reports it.
            log.warning("planning ended after the store was lost: %s", error)

    def _compare(self, detection: Detection, current: Plan) -> _Outcome:
        before = self._planning.predict(current.program, detection.cost)
        if not self._options.adapt:
            return _Outcome(before)
        case = replace(current.case, cost=detection.cost)
        program = self._planning.planner(case, current.program).compute_only()
        predicted = self._planning.predict(program, detection.cost)
        delegated = _delegated(current, detection) if self._options.delegate else current.delegated
        bound = self._planning.bound(case)
        plan = Plan(current.version, program, case, predicted, bound, detection.reason, delegated)
        return _Outcome(before, plan)

    def _conclude(self, outcome: _Outcome) -> None:
        current, step = self._agreement.current, self._agreement.slowest
        assert current is not None, "planning starts from the current plan"
        before, plan = outcome.before, outcome.plan
        if outcome.error is not None:
            self._emit(EventKind.KEPT, step, current.version, f"no other plan: {outcome.error}")
        elif plan is None or before is None:
            self._emit(EventKind.KEPT, step, current.version, "switching plans is turned off", before, before)
        elif plan.predicted >= (1 - self._options.switch_gain) * before:
            text = f"the best plan found takes {1e3 * plan.predicted:.1f} ms, the running one {1e3 * before:.1f} ms"
            self._emit(EventKind.KEPT, step, current.version, text, before, before)
        else:
            self._propose(replace(plan, version=self._next_version), before)

    def _propose(self, plan: Plan, before: float) -> None:
        self._next_version += 1
        self._agreement.propose(plan)
        self._deadline = time.monotonic() + self._options.confirm_seconds
        self._before = before
        text = f"{plan.reason}; {1e3 * plan.predicted:.1f} ms instead of {1e3 * before:.1f} ms"
        self._emit(EventKind.PROPOSED, self._agreement.slowest, plan.version, text, plan.predicted, before)
        mail = Proposed(plan.version, plan.to_json())
        for rank in range(self._ranks):
            self._mailbox.send(rank, mail)

    def _withdraw(self, proposal: Plan, why: str) -> None:
        self._agreement.withdraw()
        self._emit(EventKind.WITHDRAWN, self._agreement.slowest, proposal.version, why)

    def _advance(self) -> None:
        start = self._agreement.until
        entry = self._agreement.advance()
        if entry is None:
            return
        self._log.append(entry)
        self._log.forget(self._agreement.slowest + 1)
        for rank in range(self._ranks):
            self._mailbox.send(rank, LogGrew())
        if entry.version != self._logged_version:
            self._logged_version = entry.version
            plan = self._agreement.current
            assert plan is not None, "an entry names the current plan"
            self._emit(EventKind.AGREED, start, plan.version, plan.reason, plan.predicted, self._before)
