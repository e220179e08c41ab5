"""Job membership: each rank detects the failure or departure of any other.

Every rank keeps one record in the control store: a heartbeat, its state, and the cause if it failed. One thread steps
:class:`.heartbeat.HeartbeatProtocol`, which writes the rank's own record and asks the question that :class:`.board.Board`
describes. A rank whose record says that it failed is lost: a callback then ends this rank's waits. A rank whose heartbeat stops
is asked directly whether its process lives, see :mod:`.direct_questions`, and is lost if that is frozen, cut off or gone.

A second thread watches the first, because a store whose host is gone may block it in a call for minutes. It also puts the
direct questions. Only time in which this process ran counts, because a suspended process can't blame others for silence.

One failure soon looks like many; :mod:`.cause` finds the first. A lost rank's own report is awaited while its heartbeat goes
on, so all ranks name the same cause. No rank leaves before the others know the cause, because the store may live in its
process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from adaptra.errors import PeerLostError
from adaptra.runtime.membership.awake_clock import AwakeClock
from adaptra.runtime.membership.cause import failure_of
from adaptra.runtime.membership.direct_questions import DirectQuestions
from adaptra.runtime.membership.heartbeat import HeartbeatProtocol
from adaptra.runtime.membership.timing import KNOWN_SECONDS, LOST_STORE_SECONDS, HeartbeatTiming
from adaptra.runtime.membership.view import Phase

if TYPE_CHECKING:
    from torch.distributed import Store

    from adaptra.runtime.control_store.stores import Connection
    from adaptra.runtime.transports.base import Identity

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.1
"""Seconds between two looks for answers to direct questions."""


class Membership:
    """One rank's part in the job. Starts its threads at once.

    Args:
        store: Shared by all ranks, over a connection of its own, so that no blocking read delays a heartbeat. A
            :class:`Connection` survives breaks of the network; :meth:`close` closes it too.
        rank: This rank.
        world_size: The number of ranks.
        on_lost: Called once, from a thread of the membership, when another rank or the store is lost.
        waiting_for: Returns the message that this rank waits for from a given rank, to name the edge and the op of a loss; a
            transport's ``waiting_for``.
        interval: Seconds between two heartbeats; a failure reaches the others within about this time.
        lost_after, busy_after: As of :class:`.timing.HeartbeatTiming`.
        store_host: As of :class:`.heartbeat.HeartbeatProtocol`.
        address: A numeric address of this host on which others reach it, for direct questions. None if none can be put, because
            all ranks are in one process, say. Then a rank is lost after ``lost_after`` seconds of silence, busy or not.

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
        busy_after: float = 300.0,
        store_host: int | None = None,
        address: str | None = None,
    ) -> None:
        self._timing = HeartbeatTiming(interval, lost_after, busy_after)
        close: Callable[[Store | Connection], object] | None = getattr(type(store), "close", None)  # a connection has it
        self._end_connection = None if close is None else partial(close, store)
        self._on_lost = on_lost
        self._clock = AwakeClock(interval)
        self._condition = threading.Condition()
        self._questions = None if address is None or world_size == 1 else _questions_from(address, self._clock.now)
        self._protocol = HeartbeatProtocol(
            store,
            rank,
            world_size,
            waiting_for or _unknown,
            self._timing,
            self._clock.now,
            self._condition,
            None if store_host == rank else store_host,
            self._questions,
        )
        self._threads = [
            threading.Thread(target=target, name=f"adaptra rank {rank} membership {what}", daemon=True)
            for what, target in (("heartbeat", self._beat_for_ever), ("watch", self._watch_for_ever))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lost(self) -> PeerLostError | None:
        """The reason why the job ended, if another rank or the store is lost."""
        return self._protocol.view.lost

    @property
    def has_lost_a_process(self) -> bool:
        """True if the job ended because a process gives no sign of life, so that no other rank's error is to come."""
        return self._protocol.view.has_lost_a_process

    @property
    def has_lost_the_store(self) -> bool:
        """True if the store is lost, so that no request to it will be answered."""
        return self._protocol.view.phase is Phase.CUT_OFF

    def fail(
        self,
        error: BaseException,
        *,
        edge: tuple[int, int] | None = None,
        op: str | None = None,
        of_store: BaseException | None = None,
    ) -> BaseException:
        """Report to the others that this rank failed. Blocks until those that live know the cause, for seconds at most.

        Args:
            error: The cause. A :class:`PeerLostError` reports the loss of its rank, with its edge and op.
            edge: The directed edge of stages at that time, if known.
            op: The op at that time, if known.
            of_store: The failure of a request to the store that is the cause of ``error``, if one is.

        Returns:
            The error to be raised: the failure of another rank or the loss of the store if that was first, else ``error``.
        """
        failure = failure_of(error, edge, op)
        if of_store is not None:
            self._report_loss(self._protocol.lose_store(str(of_store)))
        with self._condition:
            self._protocol.fail(failure, error)
            self._condition.notify_all()
            self._wait_until_known()
            return self._protocol.error_for(error, failure)

    def leave(self) -> None:
        """Report that this rank leaves the job; :meth:`close` waits until the others know. May be called again."""
        with self._condition:
            self._protocol.leave()
            self._condition.notify_all()

    def close(self) -> None:
        """Leave the job. Waits until the others know, about three seconds after the cause is known, so that none takes it for a
        loss.
        """
        self.leave()
        with self._condition:
            self._wait_until_known()
            patience = LOST_STORE_SECONDS if self.has_lost_the_store else KNOWN_SECONDS
            self._protocol.view.end()
            self._condition.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(patience)
        with self._condition:
            if self._questions is not None:
                self._questions.close()
        if self._end_connection is not None and not any(thread.is_alive() for thread in self._threads):
            self._end_connection()

    def _wait_until_known(self) -> None:
        """Wait until all know that this rank failed or leaves, and why the job ends. The caller has acquired the condition."""
        self._condition.wait_for(lambda: self._protocol.view.phase is not Phase.MEMBER, self._timing.farewell_seconds)

    def _beat_for_ever(self) -> None:
        view = self._protocol.view
        while True:
            outcome = self._protocol.beat()
            self._report_loss(outcome.lost)
            with self._condition:
                if view.phase is not Phase.MEMBER or self._protocol.silent:
                    self._condition.notify_all()
                if outcome.is_last or view.phase is Phase.ENDED:
                    return
                if seconds := self._protocol.pause():
                    self._condition.wait(seconds)

    def _watch_for_ever(self) -> None:
        is_asking = False
        while True:
            with self._condition:
                self._condition.wait(min(_LOOK_SECONDS, self._timing.interval) if is_asking else self._timing.interval)
                if self._protocol.view.phase is Phase.ENDED:
                    return
                self._clock.tick()
                is_asking = self._questions is not None and self._questions.step(self._protocol.to_be_asked())
                is_stuck = self._protocol.is_stuck()
                silence = self._protocol.store_silence()
            if is_stuck:
                self._report_loss(self._protocol.lose_store(f"no answer for {silence or 0.0:.1f} s"))
                with self._condition:
                    self._condition.notify_all()

    def _report_loss(self, lost: PeerLostError | None) -> None:
        if lost is None:
            return
        try:
            self._on_lost(lost)
        except Exception:
            logger.exception("rank %d: the callback for %s failed", self._protocol.view.rank, lost)


def _questions_from(address: str, now: Callable[[], float]) -> DirectQuestions | None:
    """Return direct questions from an address of this host, or None if the system refuses a listener there."""
    try:
        return DirectQuestions(address, now)
    except (RuntimeError, ValueError) as error:
        logger.warning("no direct questions from %s: %s: silent ranks are lost, also if they are only busy", address, error)
        return None


def _unknown(rank: int) -> Identity | None:
    """Return None: the awaited message is unknown."""
