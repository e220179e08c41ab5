"""How the ranks of a job learn of each other's end.

Every rank keeps one record in the control store: a heartbeat, whether it runs, has failed or has left, and if it failed, why.
One thread writes the rank's own record and asks for what :class:`Board` says: the leader for the others' records, they for the
leader's beat, and all for all once there is news. A rank whose heartbeat stands still, or whose record says that it failed, is
lost: the callback then ends this rank's waits. Silence counts between the answer that first showed a beat and the last question
that did not show another one; so neither this rank's way to the store nor a slow store makes another silent. A second thread
watches the first, because a store whose host is gone may leave it stuck in a call for minutes. All time is that in which this
process ran: nobody else can be blamed for having been silent while it was stopped.

One failure soon looks like many, as every rank that waits for a failed one fails too, and a rank that ends its connections
because of one looks lost itself. So failures are numbered by the store, a rank that reports the loss of another gives way to
that other's own report, and that report is waited for while the other still beats: all ranks name the same cause. Nobody
leaves before the others have found it, because the store may live in the process of the rank that leaves.
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
"""How long a rank that fails or leaves stays until the others know it, once it knows the cause itself."""
_SILENT_SECONDS: Final = 1.5
"""A rank that was reported lost and has not beaten for as long is lost."""
_ANSWERS: Final = 16
"""So many of the store's last answers say how long one takes."""
_HURRY_INTERVAL: Final = 0.01
"""Seconds between two beats of a rank in a hurry, for each eight ranks: what hurries together asks for all records."""


@dataclass(slots=True)
class _Peer:
    """What this rank knows of another: its last record, and when that last changed."""

    changed_at: float
    record: RankRecord | None = None


class Membership:
    """One rank's part in the job. Starts its threads at once.

    Args:
        store: Shared by all ranks; a connection of its own, so that nobody's blocking read holds up a heartbeat. A
            :class:`Connection` outlives the network's breaks.
        rank: This rank.
        world_size: The number of ranks.
        on_lost: Called once, from a thread of the membership, when another rank or the store is lost.
        waiting_for: Which message this rank waits for from a given rank, to name the edge and the op of a loss; a transport's
            ``waiting_for``.
        interval: Seconds between two heartbeats; a failure reaches the others within about as long.
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
        # Whoever is reported lost and still beats has as long to say himself what happened.
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
        # The longest of the last answers: who judges from as far away is in doubt for as long.
        self._answers = deque([0.0], maxlen=_ANSWERS)
        self._threads = [
            threading.Thread(target=target, name=f"adaptra rank {rank} membership {what}", daemon=True)
            for what, target in (("heartbeat", self._beat_for_ever), ("watch", self._watch_for_ever))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lost(self) -> PeerLostError | None:
        """Why the job ended, if another rank or the store is lost."""
        return self._lost

    def fail(self, error: BaseException, *, edge: tuple[int, int] | None = None, op: str | None = None) -> BaseException:
        """Tell the others that this rank failed. Blocks until those that live know what caused it, for seconds at most.

        Args:
            error: Why. A :class:`PeerLostError` reports the loss of its rank, with its edge and op.
            edge: The directed edge of stages at hand, if known.
            op: The op at hand, if known.

        Returns:
            What caused it all, to be raised instead of ``error``: the failure of another rank if one was first, else ``error``.
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
            # After another's loss a failed message is a consequence, anything else a failure of its own.
            is_own = self._lost is None or not isinstance(error, TransportError)
            if is_own and self._failure is None and not self._ends and not self._store_is_lost:
                self._failure = failure
                self._enter(State.FAILED)
            elif self._state is State.RUNNING:
                self._enter(State.LEFT)
            self._wait_until_known()
            return error if self._lost is None or self._is_cause else placed(self._lost, failure)

    def leave(self) -> None:
        """Say that this rank leaves the job; :meth:`close` waits until the others know. May be called again."""
        with self._condition:
            if self._state is State.RUNNING:
                self._enter(State.LEFT)

    def close(self) -> None:
        """Leave the job. Waits until the others know, at most three seconds, so that none mistakes it for a loss."""
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
        """How long this rank stays at most until the others know that it failed or leaves."""
        return self._own_report_seconds + _KNOWN_SECONDS

    def _wait_until_known(self) -> None:
        """Wait until all know that this rank failed or leaves, and why the job ends; the condition is held."""
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
        """The ranks whose failing or leaving this rank has read."""
        return tuple(rank for rank, peer in self._peers.items() if peer.record and peer.record.state is not State.RUNNING)

    def _publish(self) -> RankRecord:
        """Write this rank's record; what it now says."""
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
        """Read what there is to read and judge it."""
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
            # A rank further away waits for another, which waits for the lost one.
            waits_at = awaited or self._awaited()
            if silent > self._lost_after + max(self._answers) and (not has_left or awaited is not None):
                what = "left the job" if has_left else f"gave no sign of life for {silent:.1f} s"
                lost = lost_error(rank, f"rank {rank} {what}", waits_at)
                self._report(lost)
                self._lose(lost)
                return

    def _ask(self) -> None:
        """Put this beat's question, and note what the answer shows."""
        is_late = self._clock.now() - self._asked_since > self._lost_after
        answer = self._board.read(self._reads_all, finds_absent=is_late or self._reads_all)
        now = self._clock.now()
        self._asked_at = answer.asked_at
        self._answers.append(now - answer.asked_at)
        for rank, payload in answer.records.items():
            peer, record = self._peers[rank], parse_record(payload, rank)
            # An older one shows no life: whoever writes to the store may put back what was read there.
            if peer.record is None or record.beat > peer.record.beat:
                peer.record, peer.changed_at = record, now
        if self._rank != LEADER and answer.bulletin > self._bulletin:
            self._bulletin, self._peers[LEADER].changed_at = answer.bulletin, now
        self._is_called = answer.is_called

    def _hears_call(self) -> bool:
        """Whether there is news, for which this rank has not read all records."""
        if self._reads_all:
            return False
        states = (peer.record.state for peer in self._peers.values() if peer.record)
        is_first = any(state is not State.RUNNING for state in states)
        self._reads_all = self._is_called or is_first
        return self._reads_all

    def _judged(self) -> Sequence[int]:
        """The ranks of whose beats this rank hears."""
        return tuple(self._peers) if self._reads_all or self._rank == LEADER else (LEADER,)

    def _settle(self, lost: int | None, failures: Mapping[int, Failure]) -> None:
        """Note whether the cause is found: a rank that was reported ``lost`` may still say itself what happened."""
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
        """Tell the others at once what they would notice a moment later."""
        with self._condition:
            if self._failure is None and self._lost is None and self._state is State.RUNNING:
                self._failure = Failure(0, str(lost), lost.rank, lost.edge, lost.op)
                self._enter(State.FAILED)

    def _awaited(self) -> Identity | None:
        """A message that this rank waits for."""
        return next(filter(None, map(self._waiting_for, self._peers)), None)

    def _is_known_to_all(self) -> bool:
        """Whether every peer that lives knows that this rank failed or left, and why the job ends, or has left itself."""
        return all(
            self._is_silent(peer) or (peer.record is not None and self._is_known_to(peer.record))
            for peer in self._peers.values()
        )

    def _is_known_to(self, record: RankRecord) -> bool:
        if record.state is State.RUNNING:
            return record.is_settled and self._rank in record.seen
        return record.is_settled or record.state is State.LEFT

    def _lose_store(self, text: str) -> None:
        # Ranks that left may have taken the store with them: then there is nobody left to train with, and nothing to report.
        with self._condition:
            is_expected = self._ends or any(peer.record and peer.record.state is State.LEFT for peer in self._peers.values())
            is_expected = is_expected or self._state is State.LEFT
            # A rank that this one has reported lost, and whose own report was still waited for: that is the cause then.
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
    """What is waited for where nobody says."""
