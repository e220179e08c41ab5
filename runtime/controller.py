"""The controller: every rank's end of the control plane, beside training and never inside a step.

Each rank has a control thread that waits for mail. It follows the plan log, checks and confirms proposed plans, and on rank 0
it also coordinates. The training thread asks :meth:`Controller.plan_for` which plan runs a step, which in steady state has been
known for a step or two and costs a comparison, and hands over what it measured with :meth:`Controller.report`, which waits for
nobody.

Whatever goes wrong on a control thread ends the control plane on all ranks: it is logged, told to ``on_error``, and raised by
the next :meth:`Controller.plan_for`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from torch.distributed import DistError, Store

from adaptra.errors import ControlError
from adaptra.runtime.coordinator import COORDINATOR, ControllerOptions, Coordinator, Planning
from adaptra.runtime.events import ControlEvent, EventKind
from adaptra.runtime.mailbox import Confirmed, Failed, LogGrew, Mail, Mailbox, Measured, Proposed, Refused, Wake
from adaptra.runtime.measurement import StepMeasurement
from adaptra.runtime.plan import Plan
from adaptra.runtime.plan_log import Coverage, LogReader
from adaptra.verify import verify

KEPT_EVENTS = 4096
"""How many events are kept."""

CLOSE_SECONDS = 10.0
"""How long closing waits for the control thread, and for planning that is under way."""

log = logging.getLogger(__name__)


class _PeerFailedError(ControlError):
    """The control thread of another rank has failed; it has told everyone itself."""


class Controller:
    """One rank's end of the control plane. It starts its thread at once.

    Args:
        rank: This rank within the pipeline.
        world_size: Ranks of the pipeline.
        store: The pipeline's store, with a prefix that no other controller uses or has used. It is cloned.
        initial: Plan 0; every rank must give the same program.
        planning: The compiler; only used on rank 0.
        options: How to behave; only those of rank 0 matter, but for ``plan_seconds``.
        prepare: Called on the control thread with a proposed plan before it is confirmed, to do beforehand what a switch needs;
            what it raises refuses the plan.
        on_event: Called with each event, by the thread that it happens on: the control thread, or for SWITCHED the training
            thread.
        on_error: Called on the control thread with the error that ends the control plane.
        first_step: The first step that will be asked for.
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
        on_error: Callable[[Exception], None] | None = None,
        first_step: int = 0,
    ) -> None:
        options = options or ControllerOptions()
        self._rank = rank
        self._ranks = world_size
        self._initial = initial
        self._prepare = prepare
        self._on_event = on_event
        self._on_error = on_error
        self._timeout = options.plan_seconds
        self._events: deque[ControlEvent] = deque(maxlen=KEPT_EVENTS)
        self._running = initial
        self._step = first_step
        self._plans = {initial.version: initial}
        self._coverage = Coverage(first_step)
        self._mailbox = Mailbox(store, rank)
        self._log = LogReader(self._mailbox.store)
        self._coordinator: Coordinator | None = None
        if rank == COORDINATOR:
            self._coordinator = Coordinator(world_size, self._mailbox, initial, planning, options, self._emit, first_step)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"adaptra-controller-{rank}", daemon=True)
        self._thread.start()

    @property
    def events(self) -> tuple[ControlEvent, ...]:
        """The last events of this rank, oldest first."""
        return tuple(self._events)

    def plan_for(self, step: int) -> Plan:
        """The plan that all ranks run this step under.

        Waits only while the log does not cover the step: at the first step, and when another rank is more than ``ahead`` steps
        behind.

        Raises:
            TransportError: :meth:`abort` was given it.
            ControlError: The control plane has failed or is closed, or the log does not reach the step within ``plan_seconds``.
        """
        self._step = step
        plan = self._coverage.plan_for(step, self._timeout)
        if plan.version != self._running.version:
            self._running = plan
            self._emit(EventKind.SWITCHED, step, plan.version, plan.reason, plan.predicted)
        return plan

    def report(self, measurement: StepMeasurement) -> None:
        """Hand over the measurement of a step that this rank has run, each step once. Waits for nobody.

        Raises:
            ControlError: The store is lost.
        """
        try:
            self._mailbox.send(COORDINATOR, Measured(measurement))
        except DistError as error:
            raise ControlError(f"rank {self._rank} lost the store of the control plane: {error}") from error

    def tell_link(self, text: str) -> None:
        """Something has happened to one of this rank's links. Any thread may."""
        self._emit(EventKind.LINK, self._step, self._running.version, text)

    def abort(self, error: Exception) -> None:
        """Training has failed elsewhere: whoever waits in :meth:`plan_for`, or asks later, gets ``error``. Any thread may."""
        self._coverage.fail(error)

    def close(self) -> None:
        """End the control thread; whoever waits in :meth:`plan_for` gets a ControlError. May be called twice.

        The store must live until every rank has closed.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._coverage.fail(ControlError(f"the controller of rank {self._rank} is closed"))
        if self._thread.is_alive():
            try:
                self._mailbox.send(self._rank, Wake())
            except DistError as error:
                log.warning("rank %d: the store was lost before the controller was closed: %s", self._rank, error)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)
        if self._coordinator is not None:
            self._coordinator.close(CLOSE_SECONDS)

    def _emit(
        self,
        kind: EventKind,
        step: int,
        version: int,
        text: str,
        predicted: float | None = None,
        predicted_before: float | None = None,
    ) -> None:
        event = ControlEvent(kind, self._rank, step, version, text, predicted, predicted_before)
        self._events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def _run(self) -> None:
        try:
            self._mailbox.send(COORDINATOR, Confirmed(self._rank, self._initial.version, self._initial.digest))
            while not self._closing.is_set():
                self._handle(self._mailbox.receive())
        except Exception as error:
            if not self._closing.is_set():
                self._fail(error)

    def _handle(self, mail: Mail) -> None:
        match mail:
            case LogGrew():
                self._follow()
            case Proposed():
                self._consider(mail)
            case Failed(rank, error):
                raise _PeerFailedError(f"the controller of rank {rank} failed: {error}")
            case Wake():
                if self._coordinator is not None and not self._closing.is_set():
                    self._coordinator.woken()
            case Measured():
                self._coordinating(mail).measured(mail)
            case Confirmed():
                self._coordinating(mail).confirmed(mail)
            case Refused():
                self._coordinating(mail).refused(mail)

    def _coordinating(self, mail: Mail) -> Coordinator:
        if self._coordinator is None:
            raise ControlError(f"rank {self._rank} got mail for the coordinator, rank {COORDINATOR}: {type(mail).__name__}")
        return self._coordinator

    def _follow(self) -> None:
        for entry in self._log.read():
            if entry.version not in self._plans:
                raise ControlError(f"the log names plan {entry.version}, which rank {self._rank} has not confirmed")
            self._coverage.extend(entry.until, self._plans[entry.version])
            for version in [version for version in self._plans if version < entry.version]:
                del self._plans[version]

    def _consider(self, proposal: Proposed) -> None:
        """Confirm a proposed plan, or refuse it: what is wrong with a plan never ends the plan that runs."""
        try:
            plan = Plan.from_json(proposal.plan)
            self._check(plan, proposal.version)
            if self._prepare is not None:
                self._prepare(plan)
        except Exception as error:
            self._emit(EventKind.REFUSED, self._step, proposal.version, str(error))
            self._mailbox.send(COORDINATOR, Refused(self._rank, proposal.version, str(error)))
            return
        self._plans[plan.version] = plan
        # Told before it is sent: the switch can then never be told before the confirmation.
        self._emit(EventKind.CONFIRMED, self._step, plan.version, plan.reason, plan.predicted)
        self._mailbox.send(COORDINATOR, Confirmed(self._rank, plan.version, plan.digest))

    def _check(self, plan: Plan, version: int) -> None:
        given, expected = plan.program, self._initial.program
        if plan.version != version or version in self._plans:
            raise ControlError(f"plan {plan.version} proposed as version {version}: expected a new version, the plan's own")
        if (given.placement, given.microbatches) != (expected.placement, expected.microbatches):
            raise ControlError(
                f"plan {version} has placement {given.placement} and {given.microbatches} microbatches: "
                f"expected {expected.placement} and {expected.microbatches}"
            )
        verify(given)

    def _fail(self, error: Exception) -> None:
        log.error("rank %d: the control plane failed", self._rank, exc_info=error)
        self._coverage.fail(error)
        if not isinstance(error, _PeerFailedError):
            for rank in range(self._ranks):
                if rank != self._rank:
                    try:
                        self._mailbox.send(rank, Failed(self._rank, f"{type(error).__name__}: {error}"))
                    except DistError as lost:
                        log.warning("rank %d: could not tell rank %d of the failure: %s", self._rank, rank, lost)
        if self._on_error is not None:
            self._on_error(error)
