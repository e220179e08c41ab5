"""One rank's part in the membership, one heartbeat per call: publish this rank's record, ask for news, judge them.

It starts no thread and waits for nothing but the store's answers. So one process can step the heartbeats of a thousand ranks,
and :class:`.membership.Membership` is this beside threads, a condition and a callback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from adaptra.errors import ControlError, PeerLostError, TransportError
from adaptra.runtime.membership.board import LEADER, Board
from adaptra.runtime.membership.cause import awaited_report, cause_of, failure_error, lost_error, placed
from adaptra.runtime.membership.direct_questions import UNKNOWN, Asker, Sign
from adaptra.runtime.membership.failure_detector import FailureDetector, Loss, is_store_lost
from adaptra.runtime.membership.record import Failure, RankRecord, State, parse_record, write_record
from adaptra.runtime.membership.timing import KNOWN_SECONDS, HeartbeatTiming
from adaptra.runtime.membership.view import Phase, View

if TYPE_CHECKING:
    from torch.distributed import Store

    from adaptra.runtime.control_store.stores import Connection
    from adaptra.runtime.transports.base import Identity


@dataclass(frozen=True, slots=True)
class BeatOutcome:
    """The outcome of a heartbeat.

    Attributes:
        lost: The loss that ends the job, if this heartbeat was the first to show one.
        is_last: True if the store failed, so that no heartbeat can follow.
    """

    lost: PeerLostError | None
    is_last: bool = False


class HeartbeatProtocol:
    """One rank's part in the membership, for one thread that calls :meth:`beat`, and for others that report by the rest.

    Args:
        store: Shared by all ranks, over a connection of its own.
        rank: This rank.
        world_size: The number of ranks.
        waiting_for: Returns the message that this rank waits for from a given rank, or None.
        timing: The limits.
        now: Returns the time, in seconds of a clock that stands still while this process does.
        guard: A lock that is held while threads read or change what they share, never during a request to the store. It may
            be acquired again by the thread that holds it.
        store_host: The rank whose process has the store, None if it is no rank's or unknown.
        asker: Puts direct questions to silent ranks; None if none can be put.

    Attributes:
        view: The members of the job, as this rank knows them.
        silent: The ranks that have sent no heartbeat lately, to be asked directly.
    """

    def __init__(
        self,
        store: Store | Connection,
        rank: int,
        world_size: int,
        waiting_for: Callable[[int], Identity | None],
        timing: HeartbeatTiming,
        now: Callable[[], float],
        guard: AbstractContextManager[Any],
        store_host: int | None = None,
        asker: Asker | None = None,
    ) -> None:
        self._store_host = store_host
        self._asker = asker
        self.silent: frozenset[int] = frozenset()
        self.view = View(rank, world_size)
        self._store = store
        self._waiting_for = waiting_for
        self._timing = timing
        self._now = now
        self._guard = guard
        self._detector = FailureDetector(timing, now())
        self._board = Board(store, rank, self.view.others, now)
        self._written: RankRecord | None = None
        self._read_failure_at: float | None = None
        self._hurry_until = now() + KNOWN_SECONDS

    def beat(self) -> BeatOutcome:
        """Publish this rank's record, ask for news, and judge them."""
        try:
            written = self._publish()
            lost = self._read()
        except ControlError as error:
            first_loss = self._lose(PeerLostError(str(error)))
            with self._guard:
                self.view.cut_off()
            return BeatOutcome(first_loss, is_last=True)
        except RuntimeError as error:
            return BeatOutcome(self.lose_store(str(error)), is_last=True)
        with self._guard:
            self.view.note_known(written, self._is_quiet)
        return BeatOutcome(lost)

    def pause(self) -> float:
        """Return the seconds until the next heartbeat is due; 0 if the last record no longer says what this rank knows."""
        written, view = self._written, self.view
        if written is None or (view.state, view.is_settled, view.gone()) != (
            written.state,
            written.is_settled,
            written.seen,
        ):
            return 0.0
        is_awaited = not view.is_settled or (written.state is not State.RUNNING and view.phase is not Phase.KNOWN)
        hurries = (is_awaited or self._lacks_the_host()) and self._now() < self._hurry_until
        # A process that is gone is lost as soon as its silence is certain, not a heartbeat later.
        hurries = hurries or any(self._sign(rank).is_gone for rank in self.silent)
        return self._timing.hurry_interval(len(view.others) + 1) if hurries else self._timing.interval

    def _lacks_the_host(self) -> bool:
        """Return True if the store's host can't be asked yet. Its announcement can't be read once it is frozen."""
        host = self._store_host
        return self._asker is not None and host is not None and not self._board.has_announcement_of(host)

    def fail(self, failure: Failure, error: BaseException) -> None:
        """Take an error of this rank as its failure, or as a consequence of what is known: then this rank leaves."""
        with self._guard:
            # After the loss of another rank a failed message is a consequence; any other error is a failure of this rank.
            is_own = self.view.lost is None or not isinstance(error, TransportError)
            if not (is_own and self._report(failure)):
                self.leave()

    def leave(self) -> None:
        """Leave the job, unless this rank has failed or left already."""
        with self._guard:
            if self.view.leave():
                self._hurry()

    def error_for(self, error: BaseException, failure: Failure) -> BaseException:
        """Return the error to be raised for one of this rank: the failure of another rank if that was first, else itself."""
        with self._guard:
            return error if self.view.lost is None or self.view.is_cause else placed(self.view.lost, failure)

    def store_silence(self) -> float | None:
        """Return the seconds without an answer of the store if that is long enough to ask its host directly; else None."""
        silence = self._now() - self._board.answered_at
        return silence if silence > self._timing.ask_after else None

    def is_stuck(self) -> bool:
        """Return True if the store has not answered for so long that it is lost, and no loss is known."""
        silence = self.store_silence()
        if silence is None or self.view.lost is not None:
            return False
        sign = UNKNOWN if self._store_host is None else self._sign(self._store_host)
        return is_store_lost(silence, min(silence, self._now() - sign.answered_at), sign, self._timing)

    def to_be_asked(self) -> frozenset[int]:
        """Return the ranks that are to be asked directly now."""
        host = self._store_host
        return self.silent if host is None or self.store_silence() is None else self.silent | {host}

    def lose_store(self, text: str) -> PeerLostError | None:
        """Take the loss of the store. Returns the error to be reported, or None if there is nothing to report."""
        # Ranks that left may have ended the store: then no rank is left to train with, and there is nothing to report.
        with self._guard:
            is_expected = self.view.expects_the_end
            # If this rank has reported another one lost and still awaits that one's own report, that loss is the cause.
            has_reported = self.view.has_reported_a_loss
        awaited = self._awaited()
        host = self._store_host
        if self.view.is_cause or (has_reported and host is None) or (is_expected and awaited is None):
            with self._guard:
                self.view.end()
            return None
        # The host outlives the search for the cause of any other failure, so what this rank reported came of the host's end.
        message = f"the control store is lost: the process that hosts it died or can't be reached: {text}"
        message = message if host is None else f"rank {host} is lost: {message}"
        lost = self._lose(lost_error(host, message, awaited), is_process=True)
        with self._guard:
            self.view.cut_off()
        return lost

    def _publish(self) -> RankRecord:
        """Write this rank's record, and return it."""
        view = self.view
        with self._guard:
            record = view.next_record()
            calls = record.state is not State.RUNNING and view.phase is not Phase.KNOWN
        if record.failure is not None and record.failure.ordinal == 0:
            record = replace(record, failure=replace(record.failure, ordinal=int(self._store.add("failures", 1))))
        view.reads_all = view.reads_all or calls
        announced = None if self._asker is None else self._asker.announcement
        self._board.write(write_record(record), calls, view.reads_all, announced)
        if record.failure is not None:
            view.failure = record.failure
        self._written = record
        return record

    def _read(self) -> PeerLostError | None:
        """Read this heartbeat's news and act on it. Returns a loss if they show one for the first time."""
        view = self.view
        is_called = self._ask()
        if not view.reads_all and (is_called or view.gone()):
            view.reads_all = True
            self._ask()
        if failures := view.failures():
            cause = cause_of(failures)
            with self._guard:
                is_found = view.find(cause, self._is_final(awaited_report(cause, failures)))
            if not is_found or view.is_cause:
                return None
            return self._lose(failure_error(cause, failures[cause], view.rank), is_process=failures[cause].is_certain)
        self._learn_whom_to_ask()
        for rank in self._judged():
            if (loss := self._loss_by_silence(rank)) is not None:
                return self._lose_silent(rank, loss)
        return None

    def _ask(self) -> bool:
        """Ask this heartbeat's question, and record the answer. Returns True if a rank has called for all records."""
        finds_absent = self.view.reads_all or self._detector.is_overdue(self._now())
        answer = self._board.read(self.view.reads_all, finds_absent)
        now = self._now()
        self._detector.answered(answer.asked_at, now)
        records = {rank: parse_record(payload, rank) for rank, payload in answer.records.items()}
        with self._guard:
            heard = [rank for rank, record in records.items() if self.view.read_record(rank, record)]
        for rank in heard:
            self._detector.heard(rank, now)
        if self.view.rank != LEADER and self.view.read_bulletin(answer.bulletin):
            self._detector.heard(LEADER, now)
        return answer.is_called

    def _is_final(self, awaited: int | None) -> bool:
        """Return True if no report of the rank ``awaited`` is to come that would replace the cause found so far."""
        now = self._now()
        if self._read_failure_at is None:
            self._read_failure_at = now
            self._hurry_until = max(self._hurry_until, now + self._timing.farewell_seconds)
        is_late = now - self._read_failure_at > self._timing.own_report_seconds
        return awaited is None or is_late or (awaited in self.view.others and self._is_quiet(awaited))

    def _judged(self) -> Sequence[int]:
        """Return the ranks whose heartbeats this rank reads."""
        return self.view.others if self.view.reads_all or self.view.rank == LEADER else (LEADER,)

    def _learn_whom_to_ask(self) -> None:
        """Find the ranks that are to be asked directly, and learn where the ranks answer that may be."""
        if self._asker is None:
            return
        announced = self._board.read_announcements(self._store_host)
        silent = [rank for rank in self._judged() if self._detector.silence(rank) >= self._timing.ask_after]
        with self._guard:
            for rank, announcement in announced.items():
                self._asker.know(rank, announcement)
            self.silent = frozenset(rank for rank in silent if not self.view.has_left(rank))

    def _sign(self, rank: int) -> Sign:
        """Return what direct questions say of a rank. One that has left answers none, and its silence tells as before."""
        if self._asker is None or self.view.has_left(rank):
            return UNKNOWN
        with self._guard:
            return self._asker.sign(rank)

    def _is_quiet(self, rank: int) -> bool:
        return self._detector.is_quiet(rank, self._sign(rank))

    def _loss_by_silence(self, rank: int) -> Loss | None:
        """Return why a rank is lost by its silence, or None if it is not, or if it has left and nobody waits for it."""
        loss = self._detector.loss(rank, self._sign(rank))
        return None if self.view.has_left(rank) and self._waiting_for(rank) is None else loss

    def _lose_silent(self, rank: int, loss: Loss) -> PeerLostError | None:
        """Take a silent rank as lost, and report that to the others at once, which they would notice a moment later."""
        silence = self._detector.silence(rank)
        what = "left the job" if self.view.has_left(rank) else f"gave no sign of life for {silence:.1f} s{loss.value}"
        # A rank that is not a neighbour waits for another rank, which waits for the lost one.
        lost = lost_error(rank, f"rank {rank} {what}", self._waiting_for(rank) or self._awaited())
        with self._guard:
            if self.view.lost is None and self.view.state is State.RUNNING:
                self._report(Failure(0, str(lost), lost.rank, lost.edge, lost.op, is_certain=loss is not Loss.SILENT))
        return self._lose(lost, is_process=True)

    def _report(self, failure: Failure) -> bool:
        is_first = self.view.fail(failure)
        if is_first:
            self._hurry()
        return is_first

    def _hurry(self) -> None:
        self._hurry_until = self._now() + self._timing.farewell_seconds

    def _awaited(self) -> Identity | None:
        """Return a message that this rank waits for, or None."""
        return next(filter(None, map(self._waiting_for, self.view.others)), None)

    def _lose(self, error: PeerLostError, *, is_process: bool = False) -> PeerLostError | None:
        with self._guard:
            return error if self.view.lose(error, is_process=is_process) else None
