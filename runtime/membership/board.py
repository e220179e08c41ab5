"""What a rank asks the control store with each heartbeat: one question, however many ranks there are.

While all is well the leader, rank 0, asks for all records at once, and every other rank for the leader's bulletin only, which
counts the leader's beats. A rank that fails, leaves or finds another silent hangs a call in the bulletin's place. Who sees the
call asks for all records from then on, until the job has ended. So a beat costs each rank one question, and only the leader's
answer grows with the number of ranks.

A question may take longer than a beat where the store is far away. So an answer says when its question was put: nothing that
was written later can be missed in it, and nobody is silent for longer than the questions themselves could have heard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from adaptra.errors import ControlError
from adaptra.runtime.membership.record import key_of

if TYPE_CHECKING:
    from torch.distributed import Store

    from adaptra.runtime.control_store.stores import Connection
    from adaptra.runtime.membership.awake_clock import AwakeClock

LEADER: Final = 0
"""The rank that reads all others' records while all is well."""
_BULLETIN: Final = "bulletin"
_CALL: Final = "call"
_ABSENT: Final = "absent"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the store said.

    Attributes:
        asked_at: When the question was put, in seconds of the clock that runs while this process does.
        records: The records read, by rank.
        bulletin: The leader's bulletin, a number that grows; 0 if there is none yet, or if it was not asked for.
        is_called: Whether a call hangs in the bulletin's place.
    """

    asked_at: float
    records: dict[int, bytes]
    bulletin: int = 0
    is_called: bool = False


class Board:
    """The records of all ranks in the control store, as one of them writes and reads them. For one thread.

    Args:
        store: Shared by all ranks.
        rank: This rank.
        peers: The other ranks.
        clock: What times are told by.
    """

    def __init__(self, store: Store | Connection, rank: int, peers: Sequence[int], clock: AwakeClock) -> None:
        self._store = store
        self._rank = rank
        self._clock = clock
        self._rank_of = {key_of(peer): peer for peer in peers}
        # The bulletin too: a connection that breaks may lose the first one.
        self._absent = {_BULLETIN, *self._rank_of}
        self._written = 0
        self.answered_at = clock.now()
        """When the store last answered."""

    def write(self, text: str, calls: bool, reads_all: bool) -> None:
        """Write this rank's record, in a message that nobody answers.

        Args:
            text: The record.
            calls: Hang the call. Repeated until it is known to be seen, since the leader may have written over it.
            reads_all: Whether this rank reads all records because of a call; the leader writes no bulletin then.
        """
        self._written += 1
        keys, values = [key_of(self._rank)], [text]
        if calls:
            keys.append(_BULLETIN)
            values.append(_CALL)
        elif self._rank == LEADER and not reads_all:
            keys.append(_BULLETIN)
            values.append(str(self._written))
        self._store.multi_set(keys, values)  # pyright: ignore[reportAttributeAccessIssue] - torch lacks its annotation

    def read(self, reads_all: bool, finds_absent: bool) -> Answer:
        """Ask what is new.

        Args:
            reads_all: Read all records, not the leader's bulletin only. The leader always does.
            finds_absent: Find out which ranks have not come, and read the others' records; else all once all have come.
        """
        asked_at = self._clock.now()
        if self._rank != LEADER and not reads_all:
            return self._read_bulletin(asked_at)
        if self._absent and not self._have_come(sorted(self._absent), finds_absent) and not finds_absent:
            return self._read_bulletin(asked_at)
        keys = [key for key in (_BULLETIN, *self._rank_of) if key not in self._absent]
        values = dict(zip(keys, self._store.multi_get(keys), strict=True)) if keys else {}
        self.answered_at = self._clock.now()
        is_called = values.pop(_BULLETIN, b"") == _CALL.encode()
        return Answer(asked_at, {self._rank_of[key]: value for key, value in values.items()}, 0, is_called)

    def _read_bulletin(self, asked_at: float) -> Answer:
        # The one question that neither waits for a key nor asks first whether it is there.
        bulletin = self._store.compare_set(_BULLETIN, _ABSENT, _ABSENT).decode()
        self.answered_at = self._clock.now()
        if bulletin in (_ABSENT, _CALL):
            return Answer(asked_at, {}, 0, bulletin == _CALL)
        if not (bulletin.isascii() and bulletin.isdecimal()):
            raise ControlError(f"membership: the bulletin of rank {LEADER}: expected a whole number, got {bulletin[:40]!r}")
        return Answer(asked_at, {}, int(bulletin))

    def _have_come(self, keys: list[str], finds_absent: bool) -> bool:
        """Whether keys are set; which of them, by halves, if that is to be found."""
        have_come = self._store.check(keys)
        self.answered_at = self._clock.now()
        if have_come:
            self._absent.difference_update(keys)
        elif finds_absent and len(keys) > 1:
            half = len(keys) // 2
            self._have_come(keys[:half], finds_absent)
            self._have_come(keys[half:], finds_absent)
        return have_come
