"""Direct questions to the processes of silent ranks, and what is known of each by them.

A rank without a heartbeat is busy, frozen or gone. Its process tells which: a listener answers from a thread that needs no
Python. So each rank that is silent is asked again and again until it beats. Each rank is also asked once at the start. If no
question gets through, as behind a firewall, that must not be taken for a death later.

A debugger on the same host stops the listener too. The system shows that, and it counts as an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol

from adaptra import _C
from adaptra.runtime.membership.announcement import Announcement, announce, is_held_by_a_debugger, key_of_token, new_token
from adaptra.runtime.membership.question import Question, Reply

AGAIN_SECONDS: Final = 0.5
"""Seconds between two questions to a silent rank. A question that is older counts as not answered, though it stays open."""
_OPEN_SECONDS: Final = 3.0
_MOST_OPEN: Final = 128
"""Questions under way at the same time, because each takes a descriptor."""
_TRIES: Final = 3
"""Questions to a rank at the start, as far apart as those to a silent one: what one of them finds may pass."""


@dataclass(frozen=True, slots=True)
class Sign:
    """What direct questions say of a rank.

    Attributes:
        is_reachable: True if a question has ever got through to its host.
        answered_at: The time of its last answer, in seconds of the asker's clock; 0 if it has given none.
        unanswered: The number of questions since its last sign of life that it should have answered by now.
        is_gone: True if its process has ended since a question got through.
        is_held: True if a debugger holds it.
    """

    is_reachable: bool = False
    answered_at: float = 0.0
    unanswered: int = 0
    is_gone: bool = False
    is_held: bool = False


UNKNOWN: Final = Sign()
"""What is known of a rank that was never asked."""


class Asker(Protocol):
    """What the heartbeats need of direct questions."""

    @property
    def announcement(self) -> Announcement:
        """This rank's own announcement."""
        ...

    def know(self, rank: int, announced: Announcement) -> None:
        """Take another rank's announcement."""

    def sign(self, rank: int) -> Sign:
        """Return what is known of a rank."""
        ...


@dataclass(slots=True)
class _Peer:
    announced: Announcement
    left: int = _TRIES
    asked_at: float = -AGAIN_SECONDS
    is_reachable: bool = False
    answered_at: float = 0.0
    is_gone: bool = False
    is_held: bool = False
    unanswered: int = 0
    questions: list[tuple[float, Question]] = field(default_factory=list)

    def forget_questions(self) -> None:
        self.unanswered = 0
        for _, question in self.questions:
            question.close()
        self.questions.clear()


class DirectQuestions:
    """This rank's listener, and its questions to others. The caller has one lock for all calls but :meth:`close`.

    Args:
        address: A numeric address of this host, on which others reach it.
        now: Returns the time, in seconds of a clock that stands still while this process does.

    Raises:
        RuntimeError: The system refuses the listener.
    """

    def __init__(self, address: str, now: Callable[[], float]) -> None:
        token = new_token()
        self._listener = _C.LivenessListener(address, key_of_token(token))
        self._own = announce(address, self._listener.port, token)
        self._now = now
        self._peers: dict[int, _Peer] = {}

    @property
    def announcement(self) -> Announcement:
        """This rank's own announcement."""
        return self._own

    def know(self, rank: int, announced: Announcement) -> None:
        """Take another rank's announcement."""
        if announced.address:
            self._peers[rank] = _Peer(announced)

    def sign(self, rank: int) -> Sign:
        """Return what is known of a rank."""
        peer = self._peers.get(rank)
        if peer is None or not peer.is_reachable:
            return UNKNOWN
        now = self._now()
        unanswered = peer.unanswered + sum(now - began >= AGAIN_SECONDS for began, _ in peer.questions)
        return Sign(peer.is_reachable, peer.answered_at, unanswered, peer.is_gone, peer.is_held)

    def step(self, silent: Collection[int]) -> bool:
        """Look for answers, and ask whom it is time to ask. It never waits.

        Args:
            silent: The ranks that have sent no heartbeat lately.

        Returns:
            True if answers are awaited.
        """
        for peer in self._peers.values():
            if peer.questions:
                self._look(peer)
        for rank, peer in self._peers.items():
            if rank not in silent and peer.is_reachable:
                peer.forget_questions()
                peer.is_gone = peer.is_held = False
        room = _MOST_OPEN - sum(len(peer.questions) for peer in self._peers.values())
        for peer in islice(self._due(silent), room):
            self._ask(peer)
        return any(peer.questions for peer in self._peers.values())

    def close(self) -> None:
        """End the listener and all questions."""
        self._listener.close()
        for peer in self._peers.values():
            peer.forget_questions()

    def _due(self, silent: Collection[int]) -> Iterator[_Peer]:
        """Yield the ranks to be asked now: the silent ones first, then those whom none has reached."""
        now = self._now()
        rested = {rank: peer for rank, peer in self._peers.items() if now - peer.asked_at >= AGAIN_SECONDS}
        yield from (rested[rank] for rank in silent if rank in rested)
        for rank, peer in rested.items():
            if rank not in silent and not peer.is_reachable and peer.left and not peer.questions:
                peer.left -= 1
                yield peer

    def _ask(self, peer: _Peer) -> None:
        peer.asked_at = self._now()
        peer.is_held = is_held_by_a_debugger(peer.announced)
        if peer.is_held:
            self._hear(peer)
            return
        peer.questions.append((peer.asked_at, Question(peer.announced)))
        self._look(peer)

    def _look(self, peer: _Peer) -> None:
        now = self._now()
        left: list[tuple[float, Question]] = []
        has_answered = False
        for began, question in peer.questions:
            reply = question.look()
            has_answered = has_answered or reply is Reply.ANSWERED
            peer.is_reachable = peer.is_reachable or question.has_got_through
            peer.is_gone = peer.is_gone or (reply is Reply.REFUSED and peer.is_reachable)
            if reply is Reply.OPEN and now - began < _OPEN_SECONDS:
                left.append((began, question))
            else:
                peer.unanswered += reply in (Reply.OPEN, Reply.UNREACHABLE)
                question.close()
        peer.questions = left
        if has_answered:
            self._hear(peer)

    def _hear(self, peer: _Peer) -> None:
        peer.answered_at = self._now()
        peer.is_reachable, peer.is_gone = True, False
        peer.forget_questions()
