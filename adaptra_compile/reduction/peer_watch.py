"""The watch of one member over the others of a sum: who is lost, and whether all do the same.

A member that dies breaks its connections. One that freezes breaks none, so a thread asks the others' processes while a sum
takes long. Whoever knows of a loss first writes it to the store, because its own end would soon look like another.

A member that has finished its sums may end while others still complete the last one. It writes to the store which one that was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from torch.distributed import Store

from adaptra.errors import AdaptraError, ControlError, PeerLostError
from adaptra.reduction.asked_store import AskedStore
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.control_store.stores import get_all, own_address, rank_0_has
from adaptra.runtime.survival.evidence import Evidence
from adaptra.runtime.transports.process_groups import Members, control_plane

_WATCHED_SECONDS: Final = 0.5
"""Seconds of a sum after which the others' processes are asked whether they live."""
_LOOK_SECONDS: Final = 0.1
_EVIDENCE_SECONDS: Final = 3.0
"""The longest time in which a broken connection is explained."""
_COMPARED_SECONDS: Final = 1.0
"""Seconds between two looks whether all do the same."""
_LINGER_SECONDS: Final = 3.0
"""The longest time for which the store's host stays behind its last sum, until others have finished it."""
_LOST: Final = "lost"


class _Meeting(NamedTuple):
    """What a member does: one value, as another thread may look at any time.

    Attributes:
        number: Of the meeting.
        doing: What, in words.
        began: When, in seconds of the monotonic clock.
    """

    number: int
    doing: str
    began: float


class PeerWatch:
    """The watch of one member. Starts a thread at once; all members make theirs at the same time.

    Args:
        members: This member of them.
        ranks: Their ranks in the job.
        end_waits: Ends this member's waits for messages.
        end: Ends its connections, behind the watch. Neither may keep alive whoever closes the watch.

    Attributes:
        error: What ends all sums of this member, once it is known.
    """

    def __init__(
        self, members: Members, ranks: Sequence[int], end_waits: Callable[[], object], end: Callable[[], object]
    ) -> None:
        self.error: AdaptraError | None = None
        self._members = members
        self._ranks = ranks
        self._end_waits = end_waits
        self._end = end
        store = control_plane(members)
        self._store = AskedStore(store)
        store.set(_doing_of(members.rank), "")  # all have, once there is the evidence
        self._evidence = Evidence(under("evidence", store), members.rank, range(members.size), own_address(store))
        self._changed = threading.Condition()
        self._meeting: _Meeting | None = None
        self._finished = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="adaptra watches the ranks of a sum", daemon=True)
        self._thread.start()

    def begin(self, number: int, doing: str) -> None:
        """Watch a meeting of this number until :meth:`end`; ``doing`` is what this member does in it, in words."""
        with self._changed:
            self._meeting = _Meeting(number, doing, time.monotonic())
            self._changed.notify()

    def finish(self) -> None:
        """Take note that this meeting has brought all that this member waits for."""
        if self._meeting is not None:
            self._finished = self._meeting.number

    def end(self) -> None:
        """Watch no more, until the next meeting."""
        self._meeting = None

    def explain(self, error: RuntimeError) -> AdaptraError:
        """Return what a broken connection comes of. If the store lives, all members name the same lost one."""
        self._end_waits()
        until = time.monotonic() + _EVIDENCE_SECONDS
        while self.error is None and time.monotonic() < until:
            self._look(asks=True)
            self._compare()
            time.sleep(_LOOK_SECONDS / 2)
        if self.error is None:
            self.error = PeerLostError(f"a sum over ranks has failed: {error}")
        return self.error

    def close(self, *, waits: bool = True) -> None:
        """End the watch and the connections. From now on this member is lost in meetings that it has not finished.

        Args:
            waits: Whether to wait until they have ended.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if waits:
            self._thread.join()

    def _close(self) -> None:
        self._store.ask(lambda store: store.set(_finished_of(self._members.rank), str(self._finished)))
        self._linger()
        self._evidence.close()
        self._store.give_back()
        self._end()

    def _linger(self) -> None:
        """Where the store ends with this process, stay until all others that live have closed too, for a while."""
        store = self._store
        if self.error is not None or self._ranks[self._members.rank] != 0 or not store.ask(rank_0_has):
            return
        until = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < until:
            left = {*range(self._members.size)} - self._evidence.against(range(self._members.size)).keys()
            if store.ask(lambda store: store.check([*map(_finished_of, left)])) is not False:  # noqa: B023 - asked at once
                return
            time.sleep(_LOOK_SECONDS / 4)

    def _lost(self) -> dict[int, str]:
        """Return which members have ended, and why, before they had finished the meeting of this one."""
        ended = self._evidence.against(range(self._members.size))
        if not ended:
            return ended
        number = 0 if (meeting := self._meeting) is None else meeting.number

        def have_finished(store: Store) -> list[int]:
            closed = [member for member in ended if store.check([_finished_of(member)])]
            texts = get_all(store, [*map(_finished_of, closed)])
            return [member for member, text in zip(closed, texts, strict=True) if int(text) >= number]

        finished = self._store.ask(have_finished) or ()
        return {member: why for member, why in ended.items() if member not in finished}

    def _look(self, *, asks: bool) -> None:
        """Look for a loss: one of which there is evidence, or one that another member has written, if this one asks for it."""
        lost = self._lost()
        own = "{} {}".format(*next(iter(lost.items()))) if lost else ""
        if self.error is None and (own or asks):
            text = self._store.ask(lambda store: store.compare_set(_LOST, "", own).decode()) or own
            if text:
                member, _, why = text.partition(" ")
                rank = self._ranks[int(member)]
                self.error = PeerLostError(f"rank {rank} is lost: it {why}", rank=rank)

    def _compare(self) -> bool:
        """Say what this member does, and look whether others do something else in the same meeting.

        Returns:
            Whether the store has answered. All that come later to this meeting then see what this member does.
        """
        meeting = self._meeting
        if meeting is None:
            return False
        own = f"{meeting.number} {meeting.doing}"
        keys = [*map(_doing_of, range(self._members.size))]

        def ask(store: Store) -> list[str]:
            store.set(keys[self._members.rank], own)
            return [text.decode() for text in get_all(store, keys)]

        texts = self._store.ask(ask)
        for member, text in enumerate(texts or ()):
            at, _, what = text.partition(" ")
            if at == str(meeting.number) and text != own and self.error is None:
                ours, theirs = self._ranks[self._members.rank], self._ranks[member]
                what = f"rank {ours} does: {meeting.doing}; rank {theirs}: {what}"
                self.error = ControlError(f"{what}: expected the same on all ranks of the group")
        return texts is not None

    def _run(self) -> None:
        try:
            self._watch()
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed)
        finally:
            self._close()

    def _watch(self) -> None:
        compared, compared_at = 0, 0.0
        while not self._is_closed and self.error is None:
            with self._changed:
                self._changed.wait_for(lambda: self._meeting is not None or self._is_closed)
            time.sleep(_LOOK_SECONDS)
            meeting = self._meeting
            if meeting is not None and time.monotonic() - meeting.began > _WATCHED_SECONDS:
                self._look(asks=False)
                now = time.monotonic()
                if (meeting.number != compared or now - compared_at > _COMPARED_SECONDS) and self._compare():
                    compared, compared_at = meeting.number, now
        if self.error is not None:
            self._end_waits()


def _doing_of(member: int) -> str:
    return f"doing/{member}"


def _finished_of(member: int) -> str:
    return f"finished/{member}"
