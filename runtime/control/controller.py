"""The controller: every rank's end of the control plane, beside training and never inside a step.

Each rank has a control thread that receives mail and takes this rank's part in the agreement on plans. On one rank it also
coordinates. Another thread checks and prepares a proposed plan, so that the control thread keeps following the plan log.

The training thread asks :meth:`Controller.plan_for` for the plan of each step. In steady state that plan has been known for a
step or two, and the call costs a comparison. :meth:`Controller.report` takes the training thread's measurements and does not
wait.

If coordinating fails, or the coordinator's connection to the store breaks, another rank coordinates. Any rank whose connection
breaks makes a new one. Any other error on a control thread ends the control plane on all ranks, and so does a second failure in
coordinating on one rank. It is logged, passed to ``on_error``, and raised by the next :meth:`Controller.plan_for`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from torch.distributed import DistError, Store

from adaptra.errors import BatchError, ControlError
from adaptra.planning.remedies.job_remedies import JobRemedy, moves
from adaptra.program import Program
from adaptra.runtime.control.agreeing_ranks import AgreeingRanks
from adaptra.runtime.control.agreement.participant import Participant, Surroundings
from adaptra.runtime.control.agreement.preparation import Preparation
from adaptra.runtime.control.agreement.same_rows import SameRows
from adaptra.runtime.control.callbacks import ControlCallbacks
from adaptra.runtime.control.coordination import Coordination
from adaptra.runtime.control.coordinator import Coordinator
from adaptra.runtime.control.deciding.policy import ControllerOptions
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.control.event_recorder import EventRecorder
from adaptra.runtime.control.log_wait import LogWait
from adaptra.runtime.control.mail.hub import Handlers, MailHub
from adaptra.runtime.control.mail.mail import (
    BatchChecksums,
    BatchMismatch,
    Confirmed,
    Failed,
    Gathered,
    Joined,
    LogGrew,
    Mail,
    Measured,
    Proposed,
    Ran,
    Refused,
    Reports,
    Spread,
    TellAnew,
    Term,
    Wake,
    Withdrawn,
)
from adaptra.runtime.control.mail.relay import Relay, RelayOptions
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.control.plans.plan_log import Coverage
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.detection.news import NewsReader, NewsTeller
from adaptra.runtime.measuring.measurement import StepMeasurement
from adaptra.runtime.world.world import FIRST_ATTEMPT, Attempt
from adaptra.simulation.cost import CostModel

CLOSE_SECONDS = 10.0
"""The longest time that closing waits for the control thread, and for planning that is under way; seconds."""

_ROUTED: Final = {JobRemedy.SHARE: EventKind.SHARED, JobRemedy.DETOUR: EventKind.DETOURED}
"""The events of switches to routes through other replicas' workers."""

log = logging.getLogger(__name__)


class _PeerFailedError(ControlError):
    """The control thread of another rank has failed, and that rank has informed all others itself."""


class Controller:
    """One rank's end of the control plane. It starts its thread at once.

    It joins the parts: the hub of mail, coverage, preparation, participant, coordination, row comparison and events.

    Args:
        ranks: The ranks that agree.
        store: Their store, with a prefix that no other controller of the attempt uses or has used. It is cloned.
        initial: Plan 0; every rank must give the same program.
        planning: The compiler; used while this rank coordinates.
        options: The coordinating rank's options apply, except for ``plan_seconds`` and ``answer_seconds``, which each rank has
            for itself.
        callbacks: What it calls.
        first_step: The first step that will be asked for.
        relaying: How mail travels; equal on all ranks.
        attempt: The attempt that it is of. Mail and log have keys of their own in each, so nobody reads an earlier one's.

    Attributes:
        recorder: Records this rank's events.
    """

    def __init__(
        self,
        ranks: AgreeingRanks,
        store: Store,
        initial: Plan,
        planning: Planning,
        *,
        options: ControllerOptions | None = None,
        callbacks: ControlCallbacks | None = None,
        first_step: int = 0,
        relaying: RelayOptions | None = None,
        attempt: Attempt = FIRST_ATTEMPT,
    ) -> None:
        options, callbacks = options or ControllerOptions(), callbacks or ControlCallbacks()
        self._ranks = ranks
        self._on_error = callbacks.on_error
        self.recorder: Final = EventRecorder(
            ranks.place, initial, first_step, callbacks.on_event, self._known, planning.activation_bytes
        )
        self._coverage = Coverage(first_step)
        self._hub = MailHub(under(str(attempt), store), ranks.rank)
        self._preparation = Preparation(
            ranks.rank,
            initial.program,
            planning.workers(initial.case),
            planning.check,
            callbacks.prepare,
            self._is_ready,
            self._is_refused,
        )
        self._relay = self._relay_for(relaying or RelayOptions(), options)
        ahead = options.ahead if self._relay is None else options.ahead + self._relay.period
        mailbox = self._hub.mailbox
        self._participant = Participant(
            ranks.rank,
            ranks.count,
            initial,
            Surroundings(
                mailbox.store,
                mailbox.send if self._relay is None else self._relay.send,
                self._coverage.extend,
                self._preparation.begin,
                self._lead,
                self.recorder.emit,
            ),
            ahead,
            first_step,
        )
        self._coordination = Coordination(
            self._participant, ranks, initial, planning, options, self.recorder, self._hub, callbacks.on_reduces
        )
        self._rows = SameRows(ranks.job_ranks or ranks.pipeline)
        self._has_mailed_difference = False
        self._wait = LogWait(ranks.rank, self._coverage, mailbox.wake, options)
        self._handlers = self._handlers_of_mail()
        self._hub.start(self._handlers)

    @property
    def events(self) -> tuple[ControlEvent, ...]:
        """The last events of this rank, oldest first."""
        return self.recorder.events

    def go_on_after(self, earlier: Controller) -> None:
        """Keep the events of the controller that this one replaces."""
        self.recorder.go_on_after(earlier.recorder)

    def plan_for(self, step: int) -> Plan:
        """Return the plan under which all ranks run this step.

        Waits only while the plan log does not cover the step: at the first step, and when another rank is more than ``ahead``
        steps behind.

        Raises:
            TransportError: The error given to :meth:`abort`.
            BatchError: Ranks of a replica were given different rows.
            ControlError: The control plane has failed or is closed, the store does not answer, or the log does not reach the
                step within ``plan_seconds``.
        """
        self.recorder.step = step
        self._wait.until_covered(step)
        plan = self._coverage.plan_for(step)
        if plan.version != self.recorder.running.version:
            self.recorder.running = plan
            seconds = plan.predicted, plan.predicted_before
            self.recorder.emit_now(EventKind.SWITCHED, plan.reason, *seconds)
            if plan.remedy in _ROUTED and not plan.program.is_one_pipeline:
                self.recorder.emit_now(_ROUTED[plan.remedy], "; ".join(moves(plan.program.routing)), *seconds)
        return plan

    def report(self, measurement: StepMeasurement) -> None:
        """Report the measurement of a step that this rank has run, each step once. Does not wait.

        Raises:
            ControlError: The store is lost.
        """
        try:
            mine = replace(measurement, rank=self._ranks.rank)
            coordinator = self._participant.reach(mine.step)
            if self._relay is None:
                self._hub.mailbox.post(coordinator, Measured(mine))
            else:
                self._hub.mailbox.hand(Ran(mine))
        except DistError as error:
            raise ControlError(f"rank {self._ranks.rank} lost the store of the control plane: {error}") from error

    def send_checksums(self, call: str, number: int, numbers: Mapping[str, int], step: int) -> None:
        """Send checksums of this rank's batch to the pipeline's first rank, which compares those of all its ranks.

        Does not wait.

        If they differ, a later step raises the error on all ranks.

        Args:
            call: The name of the pipeline's method.
            number: The number of this call of that method, from 0.
            numbers: The result of :func:`adaptra.runtime.control.agreement.same_rows.numbers_of`.
            step: The number of the next step in the whole training.

        Raises:
            ControlError: The store is lost.
        """
        try:
            self._hub.mailbox.post(self._ranks.pipeline[0], BatchChecksums(self._ranks.place, call, number, numbers, step))
        except DistError as error:
            raise ControlError(f"rank {self._ranks.rank} lost the store of the control plane: {error}") from error

    def suggest(self, program: Program, reason: str) -> None:
        """Have a compute-only program of this pipeline proposed in the next round, even if it gains nothing. Any thread may
        call it.

        Only the coordinator's rank can do so. On another rank, or if this rank stops coordinating before that round, nothing
        happens.
        """
        self._hub.request(lambda: self._coordination.suggest(program, reason))

    @property
    def measured_cost(self) -> CostModel | None:
        """The measured costs, including those that no plan is made for yet; None unless this rank coordinates."""
        return self._coordination.cost

    @property
    def coordinates(self) -> bool:
        """True while this rank coordinates."""
        return self._coordination.is_here

    def abort(self, error: Exception) -> None:
        """Make every waiting or later :meth:`plan_for` raise ``error``, because training has failed elsewhere. Any thread may
        call it.
        """
        self._coverage.fail(error)

    def close(self, patience: float = CLOSE_SECONDS) -> None:
        """End the control thread. A waiting :meth:`plan_for` raises a ControlError. May be called twice.

        The store must live until every rank has closed.

        Args:
            patience: The longest time to wait for each request to the store that is under way, seconds.
        """
        if not self._hub.stop():
            return
        self._coverage.fail(ControlError(f"the controller of rank {self._ranks.rank} is closed"))
        self._hub.close(patience)
        self._preparation.close(CLOSE_SECONDS)
        self._coordination.close(CLOSE_SECONDS)
        self._hub.give_back()

    def _known(self, version: int) -> Plan | None:
        return self._participant.known(version)

    def _lead(self, leads: bool) -> None:
        self._coordination.lead(leads)

    def _relay_for(self, relaying: RelayOptions, options: ControllerOptions) -> Relay | None:
        if self._ranks.count <= relaying.direct:
            return None
        news = NewsTeller(options.detector), NewsReader()
        ranks, send = self._ranks, self._hub.mailbox.send
        return Relay(ranks.rank, ranks.count, relaying, lambda: self._participant.coordinator, send, *news)

    def _handlers_of_mail(self) -> Handlers:
        """Return what the control thread calls for each kind of mail."""
        agreeing = dict.fromkeys((Proposed, Confirmed, Refused, Withdrawn, Joined, Term, LogGrew), self._participant.handle)
        relayed = dict.fromkeys((Ran, Gathered, Spread, TellAnew), self._unpack)
        others: dict[type, Callable[[Any], None]] = {
            BatchChecksums: self._rows.add,
            BatchMismatch: self._raise_difference,
            Failed: self._raise_failure,
            Wake: self._woken,
            Measured: self._take_report,
            Reports: self._take_reports,
        }
        return Handlers(
            begin=self._participant.start,
            before=lambda: None if self._relay is None else self._relay.flush(),
            of={**agreeing, **relayed, **others},
            after=lambda: self._coordination.act(Coordinator.begin_round),
            rejoin=self._participant.rejoin,
            fail=self._fail,
        )

    def _raise_difference(self, mail: BatchMismatch) -> None:
        self._has_mailed_difference = True
        raise BatchError(mail.error)

    def _raise_failure(self, mail: Failed) -> None:
        raise _PeerFailedError(f"the controller of rank {mail.rank} failed: {mail.error}")

    def _woken(self, _: Wake) -> None:
        self._hub.run_requests()
        if self._wait.asks():
            self._participant.impatient()
        self._coordination.act(Coordinator.woken)

    def _take_report(self, mail: Measured) -> None:
        # Detection comes first: the log entry that this report allows can then name a speculative plan.
        self._coordination.act(lambda coordinator: coordinator.measured(mail.measurement))
        self._participant.handle(mail)

    def _take_reports(self, mail: Reports) -> None:
        for measurement in mail.measurements:
            self._coordination.act(lambda coordinator, one=measurement: coordinator.measured(one))
        self._participant.handle(mail)

    def _unpack(self, mail: Ran | Gathered | Spread | TellAnew) -> None:
        if self._relay is None:
            raise ControlError(f"relayed mail: expected none among {self._ranks.count} ranks, whose mail is direct")
        inner = self._relay.ran(mail.measurement) if isinstance(mail, Ran) else self._relay.take(mail)
        for one in inner:
            self._handlers.handle(one)

    def _is_ready(self, plan: Plan) -> None:
        self.recorder.compute_memory(plan)  # here, beside training, because the training thread needs the result at the switch
        self._hub.request(lambda: self._participant.ready(plan))

    def _is_refused(self, version: int, why: str) -> None:
        self._hub.request(lambda: self._participant.refuse(version, why))

    def _fail(self, error: Exception) -> None:
        mail: Mail = Failed(self._ranks.rank, f"{type(error).__name__}: {error}")
        if isinstance(error, BatchError):  # the control plane itself is sound, and training raises the error
            mail = BatchMismatch(str(error))
        else:
            log.error("rank %d: the control plane failed", self._ranks.rank, exc_info=error)
        self._coverage.fail(error)
        if not isinstance(error, _PeerFailedError) and not self._has_mailed_difference:
            for rank in range(self._ranks.count):
                if rank != self._ranks.rank:
                    try:
                        self._hub.mailbox.send(rank, mail)
                    except DistError as lost:
                        log.warning("rank %d: could not inform rank %d of the failure: %s", self._ranks.rank, rank, lost)
        if self._on_error is not None:
            self._on_error(error)
