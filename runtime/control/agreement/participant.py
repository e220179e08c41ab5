"""A rank's part in the agreement on plans: the protocol itself, without threads, clocks or measurements.

Any rank can coordinate: the coordinator of term t is rank t modulo the number of ranks. A term begins when a rank turns to its
coordinator, because the previous one gave up or did not answer. The ranks need not agree on the term. A rank reports its
progress to one coordinator only, and the log grows only with reports of all ranks. So a new coordinator writes nothing before
all ranks have turned to it, including the former coordinator.

Two coordinators that wrote at once would still write one log, because an entry is appended only where none exists. All plan
versions come from one counter, so no two plans share one. Every rank has confirmed each version that the log names. So a wrong
belief about the coordinator costs time and nothing else.

Mail may come late, twice or never, and the rank that misses it recovers. A rank whose training waits for the log asks the
coordinator and reports its progress again. It then receives the proposals that it has not answered once more.
``tests/runtime/control/test_protocol.py`` runs this very code through all orders of events of a few ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from adaptra.errors import ControlError
from adaptra.runtime.control.mail.mail import (
    Confirmed,
    Joined,
    LogGrew,
    Mail,
    Measured,
    Proposed,
    Refused,
    Reports,
    Term,
    Withdrawn,
)
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.control.plans.plan_log import Agreement, Entry, Log, LogStore


class ProtocolStore(LogStore, Protocol):
    """The part of a torch.distributed Store that the protocol uses."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return its new value."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The interfaces of a participant.

    Attributes:
        store: The store that all ranks share.
        send: Sends mail to a rank.
        cover: Takes the next entry of the log: the steps before the first argument run the plan.
        consider: Checks a proposed plan, which may take long, and then calls :meth:`Participant.ready` or
            :meth:`Participant.refuse`.
        lead: Called with True when this rank becomes the coordinator, and with False when it stops.
        emit: Emits events.
    """

    store: ProtocolStore
    send: Callable[[int, Mail], None]
    cover: Callable[[int, Plan], None]
    consider: Callable[[Proposed], None]
    lead: Callable[[bool], None]
    emit: Callable[[ControlEvent], None]


class Participant:
    """One rank's part. All methods but :meth:`reach` are called by one thread.

    Args:
        rank: This rank.
        ranks: The number of ranks.
        initial: Plan 0, which every rank has from the start and confirms like any other.
        around: Its interfaces.
        ahead: The number of steps by which the log exceeds the next step of the slowest rank; at least 1.
        first_step: The first step that the ranks will run.
    """

    def __init__(self, rank: int, ranks: int, initial: Plan, around: Surroundings, ahead: int, first_step: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._initial = initial
        self._around = around
        self._ahead = ahead
        self._first_step = first_step
        self._term = 0
        self._reached = first_step - 1
        self._plans = {initial.version: initial}
        self._considered: set[int] = set()
        self._log = Log(around.store, ahead + 2)
        self._last: Entry | None = None
        self._agreement: Agreement | None = None
        self._before: float | None = None
        self._has_asked = False

    @property
    def coordinator(self) -> int:
        """The rank that coordinates, as far as this one knows."""
        return self._term % self._ranks

    @property
    def agreement(self) -> Agreement | None:
        """The agreement that this rank leads while it coordinates."""
        return self._agreement

    def known(self, version: int) -> Plan | None:
        """Return the plan of a version, or None if this rank neither has nor proposes it. Any thread may call it."""
        agreement = self._agreement
        proposal = None if agreement is None else agreement.proposal
        return proposal if proposal is not None and proposal.version == version else self._plans.get(version)

    def start(self) -> None:
        """Begin: rank 0 coordinates, and every rank confirms plan 0."""
        if self._rank == self.coordinator:
            self._lead()
        self._confirm(self._initial)

    def reach(self, step: int) -> int:
        """Record that this rank has run a step. Any thread may call it.

        Returns:
            The coordinator, to which the caller then reports the step.
        """
        # This writes the step and then reads the coordinator. Joining another coordinator writes that and then reads the step.
        # So at least one of them reports the step to the new coordinator.
        self._reached = step
        return self.coordinator

    def handle(self, mail: Proposed | Confirmed | Refused | Withdrawn | Joined | Term | LogGrew | Measured | Reports) -> None:
        """Act on mail.

        Raises:
            ControlError: The mail is impossible, or the ranks start with different plans.
            torch.distributed.DistError: The store is lost; see :meth:`rejoin`.
        """
        match mail:
            case LogGrew(position, until, version):
                self._take_all(self._log.hear(position, Entry(until, version)))
            case Proposed():
                self._proposed(mail)
            case Term(term):
                self._heed(term)
            case Joined(rank):
                self._check_rank(rank)
                self._joined(mail)
            case Measured(measurement):
                self._check_rank(measurement.rank)
                self._measured((measurement.rank,), measurement.step)
            case Reports(ranks, step):
                self._measured(ranks, step)
            case Confirmed(rank):
                self._check_rank(rank)
                self._confirmed(mail)
            case Refused(rank, version, why):
                self._check_rank(rank)
                self.withdraw(version, f"refused by rank {rank}: {why}")
            case Withdrawn(version):
                self._forget(version)

    def ready(self, plan: Plan) -> None:
        """Confirm a proposed plan that this rank can run, unless it has been withdrawn meanwhile."""
        if plan.version in self._considered and not self._is_past(plan.version):
            self._plans[plan.version] = plan
            # The event comes before the mail, so that the switch is never emitted before the confirmation.
            self._emit(EventKind.CONFIRMED, self._reached, plan.version, plan.reason, plan.predicted)
            self._confirm(plan)
        self._considered.discard(plan.version)

    def refuse(self, version: int, why: str) -> None:
        """Refuse a proposed plan that this rank can't run."""
        self._considered.discard(version)
        self._emit(EventKind.REFUSED, self._reached, version, why)
        self._around.send(self.coordinator, Refused(self._rank, version, why))

    def propose(self, plan: Plan, before: float | None, text: str, is_speculative: bool = False) -> None:
        """Propose a plan to the ranks under a new version. Only the coordinator does, while no other proposal is pending.

        Args:
            plan: The plan; its version does not matter.
            before: The predicted seconds of a step under the plan that it is to replace.
            text: The text of the event.
            is_speculative: Whether the ranks only prepare for it, and keep the old plan until :meth:`release`.
        """
        assert self._agreement is not None, "only the coordinator proposes"
        plan = replace(plan, version=self._initial.version + self._around.store.add("versions", 1))
        self._agreement.propose(plan, is_speculative)
        self._before = before
        self._emit(EventKind.PROPOSED, self._agreement.slowest, plan.version, text, plan.predicted, before)
        mail = Proposed(plan.version, plan.to_json())
        for rank in range(self._ranks):
            self._around.send(rank, mail)

    def release(self) -> None:
        """Accept the speculative proposal: the log names it next, or as soon as all ranks have confirmed it."""
        assert self._agreement is not None, "only the coordinator releases"
        self._agreement.release()
        self._advance(self._agreement)

    def withdraw(self, version: int, why: str) -> None:
        """Withdraw a proposal if it is still pending and not the first; all ranks keep the plan that runs."""
        agreement = self._agreement
        if (
            agreement is None
            or agreement.proposal is None
            or agreement.proposal.version != version
            or agreement.current is None
        ):
            return
        agreement.withdraw()
        self._emit(EventKind.WITHDRAWN, agreement.slowest, version, why)
        for rank in range(self._ranks):
            self._around.send(rank, Withdrawn(version))

    def impatient(self) -> None:
        """Ask the coordinator for the log, because training has waited for a while. If it has not answered before, ask the next
        one.
        """
        self._follow()
        self._join(self._term + 1 if self._has_asked else self._term)
        self._has_asked = True

    def rejoin(self) -> None:
        """Report anew after the connection to the store was replaced, because mail may be lost. A coordinator then resigns."""
        self._follow()
        self._join(self._term if self._agreement is None else self._term + 1)

    def resign(self) -> None:
        """Leave the coordination to the next rank."""
        self._join(self._term + 1)

    def _emit(
        self, kind: EventKind, step: int, version: int, text: str, predicted: float | None = None, before: float | None = None
    ) -> None:
        self._around.emit(ControlEvent(kind, self._rank, step, version, text, predicted, before))

    def _check_rank(self, rank: int) -> None:
        if rank >= self._ranks:
            raise ControlError(f"mail of rank {rank}: expected ranks 0..{self._ranks - 1}")

    def _is_past(self, version: int) -> bool:
        """Return True if the log has gone on to a later version, so that no entry can name this one."""
        return self._last is not None and version < self._last.version

    def _confirm(self, plan: Plan) -> None:
        self._around.send(self.coordinator, Confirmed(self._rank, plan.version, plan.digest))

    def _proposed(self, mail: Proposed) -> None:
        plan = self._plans.get(mail.version)
        if plan is not None:
            self._confirm(plan)
        elif self._is_past(mail.version):
            self.refuse(mail.version, f"plan {mail.version} comes late")
        else:
            self._considered.add(mail.version)
            self._around.consider(mail)

    def _forget(self, version: int) -> None:
        """Drop a plan that the log will never name, because its only possible writer has withdrawn it."""
        self._considered.discard(version)
        # The log names neither a plan later than its last entry's nor, once withdrawn, this one.
        if version > (self._initial if self._last is None else self._last).version:
            self._plans.pop(version, None)

    def _join(self, term: int) -> None:
        """Turn to the coordinator of a term."""
        if term > self._term:
            self._term = term
            self._stop_leading()
        self._has_asked = False
        self._around.send(self.coordinator, Joined(self._rank, term, self._reached))

    def _heed(self, term: int) -> None:
        self._follow()
        if term > self._term:
            self._join(term)
        elif term == self._term:
            self._has_asked = False

    def _joined(self, mail: Joined) -> None:
        if mail.term > self._term:
            self._term = mail.term
            self._stop_leading()
        takes_over = self._agreement is None and self._rank == self.coordinator
        if takes_over:
            self._lead()
        for rank in range(self._ranks) if takes_over else (mail.rank,):
            self._around.send(rank, Term(self._term))
        if self._agreement is not None:
            self._welcome(self._rank, self._reached)
            self._welcome(mail.rank, mail.reached)

    def _welcome(self, rank: int, reached: int) -> None:
        """Record the progress of a rank, and send it the proposal again if it has not answered."""
        self._measured((rank,), reached)
        assert self._agreement is not None, "only the coordinator welcomes"
        proposal = self._agreement.proposal
        if proposal is not None and self._agreement.is_missing(rank):
            self._around.send(rank, Proposed(proposal.version, proposal.to_json()))

    def _lead(self) -> None:
        """Become the coordinator, knowing only the log; the ranks report their progress."""
        self._follow()
        agreement = Agreement(self._ranks, self._first_step, self._ahead)
        if self._last is None:
            agreement.propose(self._initial)
        else:
            agreement.adopt(self._last.until, self._plans[self._last.version])
        self._agreement = agreement
        if self._term > 0:
            version = self._initial.version if self._last is None else self._last.version
            self._emit(
                EventKind.COORDINATES, max(self._reached, 0), version, f"in place of rank {(self._term - 1) % self._ranks}"
            )
        self._around.lead(True)

    def _stop_leading(self) -> None:
        if self._agreement is not None:
            self._agreement = None
            self._around.lead(False)

    def _measured(self, ranks: Iterable[int], step: int) -> None:
        # Late mail for a former coordinator is ignored: its sender will turn to the new one.
        agreement = self._agreement
        if agreement is None:
            return
        if step >= agreement.until:
            self._follow()
        for rank in ranks:
            agreement.report(rank, step)
        self._advance(agreement)

    def _confirmed(self, mail: Confirmed) -> None:
        agreement = self._agreement
        if agreement is None:
            return
        try:
            agreement.confirm(mail.rank, mail.version, mail.digest)
        except ControlError as error:
            if agreement.current is None:
                raise ControlError(f"{error}; every rank must compile the same program") from None
            self.withdraw(mail.version, str(error))
        self._advance(agreement)

    def _advance(self, agreement: Agreement) -> None:
        while (entry := agreement.advance()) is not None:
            before = self._last
            if not self._log.append(entry):
                self._follow()  # another coordinator was faster, and its entry holds
                continue
            if before is not None and entry.version != before.version:
                # The event comes before training can run the plan, so this rank's switch is emitted after the agreement.
                plan = self._plans[entry.version]
                self._emit(EventKind.AGREED, before.until, plan.version, plan.reason, plan.predicted, self._before)
            self._take(entry)
            self._log.forget(agreement.slowest + 1)
            for rank in range(self._ranks):
                if rank != self._rank:
                    self._around.send(rank, LogGrew(self._log.position - 1, entry.until, entry.version))

    def _follow(self) -> None:
        self._take_all(self._log.read())

    def _take_all(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        plan = self._plans.get(entry.version)
        if plan is None:
            raise ControlError(f"the log names plan {entry.version}, which rank {self._rank} has not confirmed")
        self._last = entry
        self._around.cover(entry.until, plan)
        for version in [version for version in self._plans if version < entry.version]:
            del self._plans[version]
        if self._agreement is not None:
            self._agreement.adopt(entry.until, plan)
