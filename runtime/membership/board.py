"""A rank's requests to the control store with each heartbeat: one question, however many ranks there are.

While all is well the leader, rank 0, reads all records at once. Every other rank reads only the leader's bulletin, which counts
the leader's heartbeats. A rank that fails, leaves or finds another one silent replaces the bulletin by a call. A rank that sees
the call reads all records from then on, until the job has ended. So a heartbeat costs each rank one question, and only the
leader's answer grows with the number of ranks.

At the start each rank also announces where its process answers direct questions. The leader reads all announcements once, and
the others those of the leader and of the store's host.

If the store is far away, a question may take longer than a heartbeat interval. So an answer states when its question was put,
and it can miss nothing that was written before. A rank's silence counts only up to the time of the last question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from adaptra.errors import ControlError
from adaptra.runtime.membership.announcement import Announcement, key_of_announcement, parse_announcement, write_announcement
from adaptra.runtime.membership.record import key_of

if TYPE_CHECKING:
    from torch.distributed import Store

    from adaptra.runtime.control_store.stores import Connection

LEADER: Final = 0
"""The rank that reads all other ranks' records while all is well."""
_BULLETIN: Final = "bulletin"
_CALL: Final = "call"
_ABSENT: Final = "absent"
_ANNOUNCED_TIMES: Final = 3
"""Heartbeats that carry the announcement, since a connection that breaks may lose one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the store.

    Attributes:
        asked_at: The time of the question, in seconds of the clock that runs while this process does.
        records: The records read, by rank.
        bulletin: The leader's bulletin, a number that grows; 0 if there is none yet, or if it was not asked for.
        is_called: True if a call has replaced the bulletin.
    """

    asked_at: float
    records: dict[int, bytes]
    bulletin: int = 0
    is_called: bool = False


class Board:
    """The records of all ranks in the control store, as one rank writes and reads them. For one thread.

    Args:
        store: Shared by all ranks.
        rank: This rank.
        peers: The other ranks.
        now: Returns the time, in seconds of the clock that runs while this process does.
    """

    def __init__(self, store: Store | Connection, rank: int, peers: Sequence[int], now: Callable[[], float]) -> None:
        self._store = store
        self._rank = rank
        self._now = now
        self._rank_of = {key_of(peer): peer for peer in peers}
        self._announced: dict[int, Announcement] = {}
        # The bulletin too: a connection that breaks may lose the first one.
        self._absent = {_BULLETIN, *self._rank_of}
        self._written = 0
        self.answered_at = now()
        """The time of the store's last answer, in seconds of the clock."""

    def write(self, text: str, calls: bool, reads_all: bool, announced: Announcement | None = None) -> None:
        """Write this rank's record, in a request without an answer.

        Args:
            text: The record.
            calls: True to write the call. It is repeated until it is known to be seen, since the leader may have overwritten
                it.
            reads_all: True if this rank reads all records because of a call; the leader writes no bulletin then.
            announced: This rank's announcement, if it has one. The first heartbeats carry it.
        """
        self._written += 1
        keys, values = [key_of(self._rank)], [text]
        if announced is not None and self._written <= _ANNOUNCED_TIMES:
            keys.append(key_of_announcement(self._rank))
            values.append(write_announcement(announced))
        if calls:
            keys.append(_BULLETIN)
            values.append(_CALL)
        elif self._rank == LEADER and not reads_all:
            keys.append(_BULLETIN)
            values.append(str(self._written))
        self._store.multi_set(keys, values)  # pyright: ignore[reportAttributeAccessIssue] - torch lacks its annotation

    def read(self, reads_all: bool, finds_absent: bool) -> Answer:
        """Ask for news.

        Args:
            reads_all: True to read all records, not the leader's bulletin only. The leader always does.
            finds_absent: True to find the ranks that have not joined and to read the others' records. False reads all records
                once all ranks have joined.
        """
        asked_at = self._now()
        if self._rank != LEADER and not reads_all:
            return self._read_bulletin(asked_at)
        if self._absent and not self._have_come(sorted(self._absent), finds_absent) and not finds_absent:
            return self._read_bulletin(asked_at)
        keys = [key for key in (_BULLETIN, *self._rank_of) if key not in self._absent]
        values = dict(zip(keys, self._store.multi_get(keys), strict=True)) if keys else {}
        self.answered_at = self._now()
        is_called = values.pop(_BULLETIN, b"") == _CALL.encode()
        return Answer(asked_at, {self._rank_of[key]: value for key, value in values.items()}, 0, is_called)

    def read_announcements(self, store_host: int | None) -> dict[int, Announcement]:
        """Return the announcements that this rank needs and that it has not returned yet. Few calls ask the store.

        Args:
            store_host: The rank whose process has the store, if any.
        """
        if self._rank == LEADER:
            wanted = [] if self._absent else [rank for rank in self._rank_of.values() if rank not in self._announced]
        else:
            wanted = sorted({LEADER, LEADER if store_host is None else store_host} - {self._rank, *self._announced})
        if len(wanted) > 1 and not self._store.check([key_of_announcement(rank) for rank in wanted]):
            return {}
        announcements: dict[int, Announcement] = {}
        if len(wanted) == 1:
            payloads = [self._store.compare_set(key_of_announcement(wanted[0]), _ABSENT, _ABSENT)]
        else:
            payloads = self._store.multi_get([key_of_announcement(rank) for rank in wanted]) if wanted else []
        for rank, payload in zip(wanted, payloads, strict=True):
            if payload != _ABSENT.encode():
                announcements[rank] = parse_announcement(payload, rank)
        if wanted:
            self.answered_at = self._now()
        self._announced |= announcements
        return announcements

    def has_announcement_of(self, rank: int) -> bool:
        """Return True if the announcement of a rank has been read."""
        return rank in self._announced

    def _read_bulletin(self, asked_at: float) -> Answer:
        # The only request that neither waits for a key nor has to check first that it exists.
        bulletin = self._store.compare_set(_BULLETIN, _ABSENT, _ABSENT).decode()
        self.answered_at = self._now()
        if bulletin in (_ABSENT, _CALL):
            return Answer(asked_at, {}, 0, bulletin == _CALL)
        if not (bulletin.isascii() and bulletin.isdecimal()):
            raise ControlError(f"membership: the bulletin of rank {LEADER}: expected a whole number, got {bulletin[:40]!r}")
        return Answer(asked_at, {}, int(bulletin))

    def _have_come(self, keys: list[str], finds_absent: bool) -> bool:
        """Return True if keys are set. If ``finds_absent``, find the missing ones by bisection."""
        have_come = self._store.check(keys)
        self.answered_at = self._now()
        if have_come:
            self._absent.difference_update(keys)
        elif finds_absent and len(keys) > 1:
            half = len(keys) // 2
            self._have_come(keys[:half], finds_absent)
            self._have_come(keys[half:], finds_absent)
        return have_come
