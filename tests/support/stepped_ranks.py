"""Ranks whose heartbeats a test or a benchmark steps in one thread, on a clock of its own, over a store that counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from counting_store import CountingStore

from adaptra.errors import PeerLostError
from adaptra.runtime.membership.announcement import Announcement
from adaptra.runtime.membership.direct_questions import UNKNOWN, Sign
from adaptra.runtime.membership.heartbeat import HeartbeatProtocol
from adaptra.runtime.membership.timing import HeartbeatTiming
from adaptra.runtime.transports.base import Identity


class ScriptedAsker:
    """Direct questions whose answers the test gives, from ranks whose announcements were read."""

    announcement = Announcement("127.0.0.1", 1, "00" * 32, "", 0, 0)

    def __init__(self, sign_of: Callable[[int], Sign]) -> None:
        self._sign_of = sign_of
        self.known: set[int] = set()

    def know(self, rank: int, announced: Announcement) -> None:
        """Take an announcement, once."""
        assert announced == self.announcement and rank not in self.known
        self.known.add(rank)

    def sign(self, rank: int) -> Sign:
        """Return what the test says of a rank."""
        return self._sign_of(rank) if rank in self.known else UNKNOWN


class SteppedRanks:
    """The heartbeats of all ranks of a job, stepped one after the other.

    Args:
        world_size: The number of ranks.
        interval, lost_after: As of a membership.
        waiting_for: Returns the message that a rank waits for from another: ``waiting_for(rank, other)``.
        sign_of: What direct questions to a rank say of it; None if none can be put.
        store_host: The rank that has the store.

    Attributes:
        store: The ranks' store.
        now: The time, seconds.
        ranks: The ranks' protocols.
        told: The loss that each rank reported, by rank.
    """

    def __init__(
        self,
        world_size: int,
        interval: float = 0.5,
        lost_after: float = 10.0,
        waiting_for: Callable[[int, int], Identity | None] = lambda rank, other: None,
        sign_of: Callable[[int], Sign] | None = None,
        store_host: int | None = None,
    ) -> None:
        self.store = CountingStore()
        self.now = 0.0
        self.interval = interval
        self.told: dict[int, PeerLostError] = {}
        timing = HeartbeatTiming(interval, lost_after)
        self.askers = [None if sign_of is None else ScriptedAsker(sign_of) for _ in range(world_size)]
        self.ranks = [
            HeartbeatProtocol(
                self.store.of(rank),
                rank,
                world_size,
                lambda other, rank=rank: waiting_for(rank, other),
                timing,
                lambda: self.now,
                threading.RLock(),
                None if store_host == rank else store_host,
                asker,
            )
            for rank, asker in enumerate(self.askers)
        ]

    def beat(self, ranks: Iterable[int] | None = None) -> None:
        """Step one heartbeat of these ranks, or of all, and let an interval pass."""
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            outcome = self.ranks[rank].beat()
            if outcome.lost is not None:
                assert rank not in self.told, "a loss is reported once"
                self.told[rank] = outcome.lost
        self.now += self.interval
