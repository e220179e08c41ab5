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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Final

from torch.distributed import DistError, DistNetworkError, Store

from adaptra.errors import BatchError, ControlError
from adaptra.planning.layouts.layout_change import RoleChange, SplitChange
from adaptra.planning.remedies.job_remedies import JobRemedy, moves
from adaptra.program import Program
from adaptra.runtime.control.agreement.participant import Participant, Surroundings
from adaptra.runtime.control.agreement.preparation import Preparation
from adaptra.runtime.control.agreement.same_rows import SameRows
from adaptra.runtime.control.coordinator import Coordinator
from adaptra.runtime.control.deciding.policy import ControllerOptions, Policy
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.control.event_recorder import EventRecorder
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
from adaptra.runtime.control.mail.mailbox import Mailbox
from adaptra.runtime.control.mail.relay import Relay, RelayOptions
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.control.plans.plan_log import Coverage
from adaptra.runtime.detection.news import NewsReader, NewsTeller
from adaptra.runtime.measuring.measurement import StepMeasurement
from adaptra.runtime.measuring.reduces import ReduceTracker, StepReduces
from adaptra.simulation.cost import CostModel

CLOSE_SECONDS = 10.0
"""The longest time that closing waits for the control thread, and for planning that is under way; seconds."""

DEAF_WAITS = 8
"""The number of control timeouts without a sign of the control thread after which the store counts as lost."""

_ROUTED: Final = {JobRemedy.SHARE: EventKind.SHARED, JobRemedy.DETOUR: EventKind.DETOURED}
"""The events of switches to routes through other replicas' workers."""

log = logging.getLogger(__name__)


class _PeerFailedError(ControlError):
    """The control thread of another rank has failed, and that rank has informed all others itself."""


class Controller:
    """One rank's end of the control plane. It starts its thread at once.

    It joins the parts: mailbox, coverage, preparation, participant, coordinator, row comparison and event recorder. The rest of
    its state is what the control thread and the training thread say to each other.

    Args:
        rank: This rank among those that agree: the ranks of the pipeline, or all workers of the job.
        world_size: The number of these ranks.
        store: Their store, with a prefix that no other controller uses or has used. It is cloned.
        initial: Plan 0; every rank must give the same program.
        planning: The compiler; used while this rank coordinates.
        options: The coordinating rank's options apply, except for ``plan_seconds`` and ``answer_seconds``, which each rank has
            for itself.
        prepare: Called with a proposed plan before it is confirmed, one at a time on a thread of its own, to prepare a switch.
            An exception that it raises refuses the plan.
        on_event: Called with each event by the thread on which it happens: the training thread for SWITCHED, else mostly the
            control thread.
        on_reduces: Called on the control thread while this rank coordinates, with REDUCE of each step on all ranks.
        on_error: Called on the control thread with the error that ends the control plane.
        first_step: The first step that will be asked for.
        pipeline: The ranks of this rank's pipeline among those that agree; all of them by default.
        job_ranks: The numbers of the pipeline's ranks in the job, if these differ; errors use them.
        relaying: How mail travels; equal on all ranks.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        initial: Plan,
        planning: Planning,
        *,
        options: ControllerOptions | None = None,
        prepare: Callable[[Plan], None] | None = None,
        on_event: Callable[[ControlEvent], None] | None = None,
        on_reduces: Callable[[StepReduces], None] | None = None,
        on_error: Callable[[Exception], None] | None = None,
        first_step: int = 0,
        pipeline: range | None = None,
        job_ranks: Sequence[int] = (),
        relaying: RelayOptions | None = None,
    ) -> None:
        options = options or ControllerOptions()
        self._rank = rank
        self._ranks = world_size
        self._pipeline = range(world_size) if pipeline is None else pipeline
        self._initial = initial
        self._planning = planning
        self._options = options
        self._on_error, self._on_reduces = on_error, on_reduces
        self._recorder = EventRecorder(on_event, self._known, planning.activation_bytes)
        self._running = initial
        self._step = first_step
        self._coverage = Coverage(first_step)
        self._mailbox = Mailbox(store, rank)
        self._preparation = Preparation(
            rank,
            initial.program,
            planning.workers(initial.case),
            planning.check,
            prepare,
            self._is_ready,
            self._is_refused,
        )
        self._relay = self._relay_for(relaying or RelayOptions(), options)
        ahead = options.ahead if self._relay is None else options.ahead + self._relay.period
        self._participant = Participant(
            rank,
            world_size,
            initial,
            Surroundings(
                self._mailbox.store,
                self._mailbox.send if self._relay is None else self._relay.send,
                self._coverage.extend,
                self._preparation.begin,
                self._lead,
                self._emit,
            ),
            ahead,
            first_step,
        )
        self._coordinator: Coordinator | None = None
        self._has_resigned = False
        self._rows = SameRows(job_ranks or self._pipeline)
        self._has_mailed_difference = False
        self._requests: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_impatient = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"adaptra-controller-{rank}", daemon=True)
        self._thread.start()

    @property
    def events(self) -> tuple[ControlEvent, ...]:
        """The last events of this rank, oldest first."""
        return self._recorder.events

    def go_on_after(self, earlier: Controller) -> None:
        """Keep the events of the controller that this one replaces."""
        self._recorder.go_on_after(earlier._recorder)

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
        self._step = step
        if not self._coverage.wait_for(step, 0.0):
            self._wait_for(step)
        plan = self._coverage.plan_for(step)
        if plan.version != self._running.version:
            self._running = plan
            seconds = plan.predicted, plan.predicted_before
            self._emit_now(EventKind.SWITCHED, plan.reason, *seconds)
            if plan.remedy in _ROUTED and not plan.program.is_one_pipeline:
                self._emit_now(_ROUTED[plan.remedy], "; ".join(moves(plan.program.routing)), *seconds)
        return plan

    def report(self, measurement: StepMeasurement) -> None:
        """Report the measurement of a step that this rank has run, each step once. Does not wait.

        Raises:
            ControlError: The store is lost.
        """
        try:
            mine = replace(measurement, rank=self._rank)
            coordinator = self._participant.reach(mine.step)
            if self._relay is None:
                self._mailbox.post(coordinator, Measured(mine))
            else:
                self._mailbox.hand(Ran(mine))
        except DistError as error:
            raise ControlError(f"rank {self._rank} lost the store of the control plane: {error}") from error

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
            self._mailbox.post(self._pipeline[0], BatchChecksums(self._place, call, number, numbers, step))
        except DistError as error:
            raise ControlError(f"rank {self._rank} lost the store of the control plane: {error}") from error

    def suggest(self, program: Program, reason: str) -> None:
        """Have a compute-only program of this pipeline proposed in the next round, even if it gains nothing. Any thread may
        call it.

        Only the coordinator's rank can do so. On another rank, or if this rank stops coordinating before that round, nothing
        happens.
        """
        self._request(lambda: None if self._coordinator is None else self._coordinator.suggest(program, reason))

    def emit_link_event(self, text: str) -> None:
        """Emit an event about one of this rank's links. Any thread may call it."""
        self._emit_now(EventKind.LINK, text)

    def emit_shape_event(self, kind: EventKind, text: str) -> None:
        """Emit an event about a shape of batch, before the next step. Any thread may call it."""
        self._emit_now(kind, text)

    def emit_change(self, change: RoleChange | SplitChange) -> None:
        """Emit the event of a role change or a cut change before the next step. Any thread may call it."""
        kind = EventKind.ROLES if isinstance(change, RoleChange) else EventKind.SPLIT
        self._emit_now(kind, str(change), change.seconds_after, change.seconds_before)

    @property
    def measured_cost(self) -> CostModel | None:
        """The measured costs, including those that no plan is made for yet; None unless this rank coordinates."""
        coordinator = self._coordinator
        return None if coordinator is None else coordinator.cost

    @property
    def coordinates(self) -> bool:
        """True while this rank coordinates."""
        return self._coordinator is not None

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
        if self._closing.is_set():
            return
        self._closing.set()
        self._coverage.fail(ControlError(f"the controller of rank {self._rank} is closed"))
        self._mailbox.wake()
        try:
            self._mailbox.close(patience)
        except DistError as error:
            log.warning("rank %d: the store was lost before the controller was closed: %s", self._rank, error)
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)
        self._preparation.close(CLOSE_SECONDS)
        if (coordinator := self._coordinator) is not None:
            coordinator.close(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._mailbox.give_back()

    @property
    def _place(self) -> int:
        """This rank within its pipeline."""
        return self._pipeline.index(self._rank)

    def _emit(self, event: ControlEvent) -> None:
        """Emit an event of this rank. Events name a rank by its place in its pipeline."""
        self._recorder.emit(replace(event, rank=self._place))

    def _known(self, version: int) -> Plan | None:
        return self._participant.known(version)

    def _emit_now(self, kind: EventKind, text: str, predicted: float | None = None, before: float | None = None) -> None:
        """Emit an event about the plan that this rank runs."""
        self._emit(ControlEvent(kind, self._rank, self._step, self._running.version, text, predicted, before))

    def _wait_for(self, step: int) -> None:
        """Wait until the log covers a step, and ask the coordinator after each control timeout."""
        waited, unheard, limit = 0.0, 0, self._options.plan_seconds
        while True:
            left = self._options.answer_seconds if limit is None else min(self._options.answer_seconds, limit - waited)
            started = time.monotonic()
            if self._coverage.wait_for(step, left):
                return
            waited += time.monotonic() - started
            if limit is not None and waited >= limit:
                raise ControlError(
                    f"step {step} has no plan after {limit} s: a rank has not reported its last step, or has not confirmed the "
                    "first plan"
                )
            unheard = unheard + 1 if self._is_impatient.is_set() else 0
            if unheard == DEAF_WAITS:
                raise ControlError(
                    f"step {step} has no plan: rank {self._rank} lost the control channel: the store has not answered for "
                    f"{unheard * self._options.answer_seconds:g} s"
                )
            self._is_impatient.set()
            self._mailbox.wake()

    def _run(self) -> None:
        try:
            self._participant.start()
            while not self._closing.is_set():
                if self._relay is not None:
                    self._relay.flush()
                self._receive()
        except Exception as error:
            if not self._closing.is_set():
                self._fail(error)

    def _receive(self) -> None:
        try:
            mail = self._mailbox.receive()
        except DistNetworkError as error:
            log.warning("rank %d: the connection to the store broke, making another: %s", self._rank, error)
            self._mailbox.reconnect()
            self._participant.rejoin()
        else:
            self._handle(mail)

    def _relay_for(self, relaying: RelayOptions, options: ControllerOptions) -> Relay | None:
        if self._ranks <= relaying.direct:
            return None
        news = NewsTeller(options.detector), NewsReader()
        return Relay(self._rank, self._ranks, relaying, lambda: self._participant.coordinator, self._mailbox.send, *news)

    def _handle(self, mail: Mail | Wake | Ran | Reports) -> None:
        match mail:
            case BatchChecksums():
                self._rows.add(mail)
            case BatchMismatch(error):
                self._has_mailed_difference = True
                raise BatchError(error)
            case Failed(rank, error):
                raise _PeerFailedError(f"the controller of rank {rank} failed: {error}")
            case Wake():
                self._woken()
            case Measured(measurement):
                # Detection comes first: the log entry that this report allows can then name a speculative plan.
                self._coordinate(lambda coordinator: coordinator.measured(measurement))
                self._participant.handle(mail)
            case Reports(measurements=measurements):
                for measurement in measurements:
                    self._coordinate(lambda coordinator, one=measurement: coordinator.measured(one))
                self._participant.handle(mail)
            case Ran() | Gathered() | Spread() | TellAnew():
                for inner in self._relayed(mail):
                    self._handle(inner)
            case Proposed() | Confirmed() | Refused() | Withdrawn() | Joined() | Term() | LogGrew():
                self._participant.handle(mail)
        self._coordinate(Coordinator.begin_round)

    def _relayed(self, mail: Ran | Gathered | Spread | TellAnew) -> Sequence[Mail | Reports]:
        if self._relay is None:
            raise ControlError(f"relayed mail: expected none among {self._ranks} ranks, whose mail is direct")
        return self._relay.ran(mail.measurement) if isinstance(mail, Ran) else self._relay.take(mail)

    def _woken(self) -> None:
        while not self._requests.empty():
            self._requests.get()()
        if self._is_impatient.is_set():
            self._is_impatient.clear()
            self._participant.impatient()
        self._coordinate(Coordinator.woken)

    def _lead(self, leads: bool) -> None:
        """Begin or end to coordinate. The outcome of planning that is under way is then ignored."""
        self._coordinator = None
        agreement = self._participant.agreement
        if leads and agreement is not None:
            running = agreement.current or self._initial
            policy = Policy(self._rank, self._ranks, running, self._planning, self._options)
            tracker = ReduceTracker(self._place, self._pipeline)
            self._coordinator = Coordinator(
                self._participant, policy, tracker, self._emit, self._on_reduces, self._mailbox.wake
            )

    def _coordinate(self, act: Callable[[Coordinator], None]) -> None:
        """Run the coordinator's part. The first failure hands coordination to another rank, and a second one is raised."""
        if self._coordinator is None or self._closing.is_set():
            return
        try:
            act(self._coordinator)
        except DistError:
            raise
        except Exception as error:
            if self._has_resigned:
                raise
            self._has_resigned = True
            log.exception("rank %d: coordinating failed, another rank takes over", self._rank)
            self._emit_now(EventKind.RESIGNED, f"{type(error).__name__}: {error}")
            self._participant.resign()

    def _is_ready(self, plan: Plan) -> None:
        self._recorder.compute_memory(plan)  # here, beside training, because the training thread needs the result at the switch
        self._request(lambda: self._participant.ready(plan))

    def _is_refused(self, version: int, why: str) -> None:
        self._request(lambda: self._participant.refuse(version, why))

    def _request(self, act: Callable[[], None]) -> None:
        """Have ``act`` called on the control thread. Any thread may call this."""
        self._requests.put(act)
        self._mailbox.wake()

    def _fail(self, error: Exception) -> None:
        mail: Mail = Failed(self._rank, f"{type(error).__name__}: {error}")
        if isinstance(error, BatchError):  # the control plane itself is sound, and training raises the error
            mail = BatchMismatch(str(error))
        else:
            log.error("rank %d: the control plane failed", self._rank, exc_info=error)
        self._coverage.fail(error)
        if not isinstance(error, _PeerFailedError) and not self._has_mailed_difference:
            for rank in range(self._ranks):
                if rank != self._rank:
                    try:
                        self._mailbox.send(rank, mail)
                    except DistError as lost:
                        log.warning("rank %d: could not inform rank %d of the failure: %s", self._rank, rank, lost)
        if self._on_error is not None:
            self._on_error(error)
