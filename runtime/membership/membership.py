"""Job membership: each rank detects the failure or departure of any other.

Every rank keeps one record in the control store: a heartbeat, its state, and the cause if it failed. One thread writes the
rank's own record and asks the question that :class:`Board` describes. A rank whose heartbeat stops, or whose record says that
it failed, is lost: a callback then ends this rank's waits.

Silence lasts from the answer that first showed a heartbeat to the last question that showed no newer one. So neither this
rank's delay to the store nor a slow store makes another rank look silent. A second thread watches the first, because a store
whose host is gone may block it in a call for minutes. Only time in which this process ran counts, because a suspended process
can't blame others for silence.

One failure soon looks like many: every rank that waits for a failed one fails too. A rank that ends its connections because of
a failure looks lost itself. So the store numbers failures, and a report of another rank's loss gives way to that rank's own
report. That report is awaited while the rank's heartbeat goes on, so all ranks name the same cause. No rank leaves before the
others know the cause, because the store may live in its process.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from adaptra.errors import ControlError, PeerLostError, TransportError
from adaptra.runtime.membership.awake_clock import AwakeClock
from adaptra.runtime.membership.board import LEADER, Board
from adaptra.runtime.membership.record import (
    TEXT_LIMIT,
    Failure,
    RankRecord,
    State,
    cause_of,
    failure_error,
    lost_error,
    parse_record,
    placed,
    write_record,
)

if TYPE_CHECKING:
    from torch.distributed import Store

    from adaptra.runtime.control_store.stores import Connection
    from adaptra.runtime.transports.base import Identity

logger = logging.getLogger(__name__)

_KNOWN_SECONDS: Final = 3.0
"""The time that a rank which fails or leaves stays until the others know it, once it knows the cause itself; seconds."""
_SILENT_SECONDS: Final = 1.5
"""Seconds without a heartbeat after which a rank that was reported lost is lost."""
_ANSWERS: Final = 16
"""The number of the store's last answers from which its response time is taken."""
_HURRY_INTERVAL: Final = 0.01
"""Seconds between two heartbeats of a rank in a hurry, per eight ranks, because all ranks in a hurry read all records."""


@dataclass(slots=True)
class _Peer:
    """This rank's knowledge of another rank: its last record, and the time of that record's last change."""

    changed_at: float
    record: RankRecord | None = None


class Membership:
    """One rank's part in the job. Starts its threads at once.

    Args:
        store: Shared by all ranks, over a connection of its own, so that no blocking read delays a heartbeat. A
            :class:`Connection` survives breaks of the network.
        rank: This rank.
        world_size: The number of ranks.
        on_lost: Called once, from a thread of the membership, when another rank or the store is lost.
        waiting_for: Returns the message that this rank waits for from a given rank, to name the edge and the op of a loss; a
            transport's ``waiting_for``.
        interval: Seconds between two heartbeats; a failure reaches the others within about this time.
        lost_after: Seconds without a heartbeat after which a rank is lost.

    Raises:
        ValueError: ``lost_after`` does not leave time for several heartbeats.
    """

    def __init__(
        self,
        store: Store | Connection,
        rank: int,
        world_size: int,
        on_lost: Callable[[PeerLostError], object],
        *,
        waiting_for: Callable[[int], Identity | None] | None = None,
        interval: float = 0.5,
        lost_after: float = 10.0,
    ) -> None:
        if not 0 < interval <= lost_after / 3:
            raise ValueError(f"interval={interval}, lost_after={lost_after}: expected 0 < interval <= lost_after / 3")
        self._store = store
        self._rank = rank
        self._hurry_interval = min(interval, _HURRY_INTERVAL * max(1, world_size / 8))
        self._on_lost = on_lost
        self._waiting_for = waiting_for or _unknown
        self._interval = interval
        self._lost_after = lost_after
        # A rank that is reported lost but still sends heartbeats has this time to report the cause itself.
        self._own_report_seconds = lost_after / 2
        self._silent_seconds = max(3 * interval, min(_SILENT_SECONDS, lost_after))
        self._clock = AwakeClock(interval)
        self._peers = {peer: _Peer(self._clock.now()) for peer in range(world_size) if peer != rank}
        self._condition = threading.Condition()
        self._state = State.RUNNING
        self._failure: Failure | None = None
        self._is_known = False
        self._is_settled = True
        self._reported_at: float | None = None
        self._hurry_until = 0.0
        self._is_cause = False
        self._store_is_lost = False
        self._lost: PeerLostError | None = None
        self._ends = False
        self._beat = 0
        self._reads_all = False
        self._is_called = False
        self._asked_since = self._clock.now()
        self._board = Board(store, rank, tuple(self._peers), self._clock)
        self._asked_at = self._clock.now()
        self._bulletin = 0
        # The longest of these response times is added to a rank's timeout.
        self._answers = deque([0.0], maxlen=_ANSWERS)
        self._threads = [
            threading.Thread(target=target, name=f"adaptra rank {rank} membership {what}", daemon=True)
            for what, target in (("heartbeat", self._beat_for_ever), ("watch", self._watch_for_ever))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lost(self) -> PeerLostError | None:
        """The reason why the job ended, if another rank or the store is lost."""
        return self._lost

    def fail(self, error: BaseException, *, edge: tuple[int, int] | None = None, op: str | None = None) -> BaseException:
        """Report to the others that this rank failed. Blocks until those that live know the cause, for seconds at most.

        Args:
            error: The cause. A :class:`PeerLostError` reports the loss of its rank, with its edge and op.
            edge: The directed edge of stages at that time, if known.
            op: The op at that time, if known.

        Returns:
            The error to be raised: the failure of another rank if that was first, else ``error``.
        """
        is_report = isinstance(error, PeerLostError)
        failure = Failure(
            ordinal=0,
            message=f"{type(error).__name__}: {error}"[:TEXT_LIMIT],
            lost=error.rank if is_report else None,
            edge=edge or (error.edge if is_report else None),
            op=op or (error.op if is_report else None),
        )
        with self._condition:
            # After the loss of another rank a failed message is a consequence; any other error is a failure of this rank.
            is_own = self._lost is None or not isinstance(error, TransportError)
            if is_own and self._failure is None and not self._ends and not self._store_is_lost:
                self._failure = failure
                self._enter(State.FAILED)
            elif self._state is State.RUNNING:
                self._enter(State.LEFT)
            self._wait_until_known()
            return error if self._lost is None or self._is_cause else placed(self._lost, failure)

    def leave(self) -> None:
        """Report that this rank leaves the job; :meth:`close` waits until the others know. May be called again."""
        with self._condition:
            if self._state is State.RUNNING:
                self._enter(State.LEFT)

    def close(self) -> None:
        """Leave the job. Waits until the others know, about three seconds after the cause is known, so that none takes it for a
        loss.
        """
        self.leave()
        with self._condition:
            if not self._ends:
                self._wait_until_known()
            self._ends = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_KNOWN_SECONDS)

    def _enter(self, state: State) -> None:
        self._state = state
        self._is_known = False
        if state is State.FAILED:
            self._is_settled = False
        self._hurry_until = self._clock.now() + self._patience
        self._condition.notify_all()

    @property
    def _patience(self) -> float:
        """The longest time that this rank stays until the others know that it failed or leaves, seconds."""
        return self._own_report_seconds + _KNOWN_SECONDS

    def _wait_until_known(self) -> None:
        """Wait until all know that this rank failed or leaves, and why the job ends. The caller has acquired the condition."""
        self._condition.wait_for(lambda: self._is_known or self._ends or self._store_is_lost, self._patience)

    def _beat_for_ever(self) -> None:
        while True:
            try:
                written = self._publish()
                self._read()
            except ControlError as error:
                self._lose(PeerLostError(str(error)))
                self._give_up_store()
                return
            except RuntimeError as error:
                self._lose_store(str(error))
                return
            with self._condition:
                self._is_known = written.state is not State.RUNNING and written.is_settled and self._is_known_to_all()
                if self._is_known:
                    self._condition.notify_all()
                if self._ends:
                    return
                if (self._state, self._is_settled, self._seen()) == (written.state, written.is_settled, written.seen):
                    is_awaited = not self._is_settled or (written.state is not State.RUNNING and not self._is_known)
                    hurries = is_awaited and self._clock.now() < self._hurry_until
                    self._condition.wait(self._hurry_interval if hurries else self._interval)

    def _watch_for_ever(self) -> None:
        while True:
            with self._condition:
                self._condition.wait(self._interval)
                if self._ends:
                    return
                self._clock.tick()
                is_stuck = self._lost is None and self._clock.now() - self._board.answered_at > self._lost_after
            if is_stuck:
                self._lose_store(f"no answer for {self._lost_after} s")

    def _seen(self) -> tuple[int, ...]:
        """Return the ranks of which this rank has read that they failed or left."""
        return tuple(rank for rank, peer in self._peers.items() if peer.record and peer.record.state is not State.RUNNING)

    def _publish(self) -> RankRecord:
        """Write this rank's record, and return it."""
        with self._condition:
            failure, state, is_settled, seen = self._failure, self._state, self._is_settled, self._seen()
        if failure is not None and failure.ordinal == 0:
            failure = Failure(int(self._store.add("failures", 1)), failure.message, failure.lost, failure.edge, failure.op)
        self._beat += 1
        record = RankRecord(self._beat, state, failure, seen, is_settled)
        calls = state is not State.RUNNING and not self._is_known
        self._reads_all = self._reads_all or calls
        self._board.write(write_record(record), calls, self._reads_all)
        if failure is not None:
            self._failure = failure
        return record

    def _read(self) -> None:
        """Read this heartbeat's news and act on it."""
        self._ask()
        if self._hears_call():
            self._ask()
        failures = {rank: peer.record.failure for rank, peer in self._peers.items() if peer.record and peer.record.failure}
        if self._failure is not None and self._failure.ordinal:
            failures[self._rank] = self._failure
        if failures:
            rank = cause_of(failures)
            self._settle(failures[rank].lost, failures)
            if not self._is_settled:
                return
            self._is_cause = rank == self._rank
            if rank != self._rank:
                self._lose(failure_error(rank, failures[rank], self._rank))
            return
        for rank in self._judged():
            peer = self._peers[rank]
            silent = self._asked_at - peer.changed_at
            has_left = peer.record is not None and peer.record.state is State.LEFT
            awaited = self._waiting_for(rank)
            # A rank that is not a neighbour waits for another rank, which waits for the lost one.
            waits_at = awaited or self._awaited()
            if silent > self._lost_after + max(self._answers) and (not has_left or awaited is not None):
                what = "left the job" if has_left else f"gave no sign of life for {silent:.1f} s"
                lost = lost_error(rank, f"rank {rank} {what}", waits_at)
                self._report(lost)
                self._lose(lost)
                return

    def _ask(self) -> None:
        """Ask this heartbeat's question, and record the answer."""
        is_late = self._clock.now() - self._asked_since > self._lost_after
        answer = self._board.read(self._reads_all, finds_absent=is_late or self._reads_all)
        now = self._clock.now()
        self._asked_at = answer.asked_at
        self._answers.append(now - answer.asked_at)
        for rank, payload in answer.records.items():
            peer, record = self._peers[rank], parse_record(payload, rank)
            # An older record is no sign of life: any client of the store may write back an old value.
            if peer.record is None or record.beat > peer.record.beat:
                peer.record, peer.changed_at = record, now
        if self._rank != LEADER and answer.bulletin > self._bulletin:
            self._bulletin, self._peers[LEADER].changed_at = answer.bulletin, now
        self._is_called = answer.is_called

    def _hears_call(self) -> bool:
        """Return True if there is news for which this rank has not read all records yet."""
        if self._reads_all:
            return False
        states = (peer.record.state for peer in self._peers.values() if peer.record)
        is_first = any(state is not State.RUNNING for state in states)
        self._reads_all = self._is_called or is_first
        return self._reads_all

    def _judged(self) -> Sequence[int]:
        """Return the ranks whose heartbeats this rank reads."""
        return tuple(self._peers) if self._reads_all or self._rank == LEADER else (LEADER,)

    def _settle(self, lost: int | None, failures: Mapping[int, Failure]) -> None:
        """Record whether the cause is known: a rank that was reported ``lost`` may still report the cause itself."""
        now = self._clock.now()
        if self._reported_at is None:
            self._reported_at = now
            self._hurry_until = max(self._hurry_until, now + self._patience)
        is_final = lost is None or lost in failures or now - self._reported_at > self._own_report_seconds
        is_settled = is_final or (lost in self._peers and self._is_silent(self._peers[lost]))
        with self._condition:
            self._is_settled = self._lost is not None or is_settled

    def _is_silent(self, peer: _Peer) -> bool:
        return self._asked_at - peer.changed_at > self._silent_seconds

    def _report(self, lost: PeerLostError) -> None:
        """Report a loss to the others at once, which they would notice a moment later."""
        with self._condition:
            if self._failure is None and self._lost is None and self._state is State.RUNNING:
                self._failure = Failure(0, str(lost), lost.rank, lost.edge, lost.op)
                self._enter(State.FAILED)

    def _awaited(self) -> Identity | None:
        """Return a message that this rank waits for, or None."""
        return next(filter(None, map(self._waiting_for, self._peers)), None)

    def _is_known_to_all(self) -> bool:
        """Return True if every peer that lives knows that this rank failed or left and why the job ends, or has left itself."""
        return all(
            self._is_silent(peer) or (peer.record is not None and self._is_known_to(peer.record))
            for peer in self._peers.values()
        )

    def _is_known_to(self, record: RankRecord) -> bool:
        if record.state is State.RUNNING:
            return record.is_settled and self._rank in record.seen
        return record.is_settled or record.state is State.LEFT

    def _lose_store(self, text: str) -> None:
        # Ranks that left may have ended the store: then no rank is left to train with, and there is nothing to report.
        with self._condition:
            is_expected = self._ends or any(peer.record and peer.record.state is State.LEFT for peer in self._peers.values())
            is_expected = is_expected or self._state is State.LEFT
            # If this rank has reported another one lost and still awaits that one's own report, that loss is the cause.
            has_told = self._failure is not None and self._failure.lost is not None and self._lost is None
        awaited = self._awaited()
        if self._is_cause or has_told or (is_expected and awaited is None):
            with self._condition:
                self._ends = True
                self._condition.notify_all()
            return
        message = f"the control store is lost: the process that hosts it died or can't be reached: {text}"
        self._lose(lost_error(None, message, awaited))
        self._give_up_store()

    def _give_up_store(self) -> None:
        with self._condition:
            self._store_is_lost = True
            self._condition.notify_all()

    def _lose(self, error: PeerLostError) -> None:
        with self._condition:
            if self._lost is not None or self._ends:
                return
            self._lost = error
            self._condition.notify_all()
        try:
            self._on_lost(error)
        except Exception:
            logger.exception("rank %d: the callback for %s failed", self._rank, error)


def _unknown(rank: int) -> Identity | None:
    """Return None: the awaited message is unknown."""
