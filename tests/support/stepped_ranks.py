"""Ranks whose heartbeats a test or a benchmark steps in one thread, on a clock of its own, over a store that counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from counting_store import CountingStore

from adaptra.errors import PeerLostError
from adaptra.runtime.membership.heartbeat import HeartbeatProtocol, HeartbeatTiming
from adaptra.runtime.transports.base import Identity


class SteppedRanks:
    """The heartbeats of all ranks of a job, stepped one after the other.

    Args:
        world_size: The number of ranks.
        interval, lost_after: As of a membership.
        waiting_for: Returns the message that a rank waits for from another: ``waiting_for(rank, other)``.

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
    ) -> None:
        self.store = CountingStore()
        self.now = 0.0
        self.interval = interval
        self.told: dict[int, PeerLostError] = {}
        timing = HeartbeatTiming(interval, lost_after)
        self.ranks = [
            HeartbeatProtocol(
                self.store.of(rank),
                rank,
                world_size,
                lambda other, rank=rank: waiting_for(rank, other),
                timing,
                lambda: self.now,
                threading.RLock(),
            )
            for rank in range(world_size)
        ]

    def beat(self, ranks: Iterable[int] | None = None) -> None:
        """Step one heartbeat of these ranks, or of all, and let an interval pass."""
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            outcome = self.ranks[rank].beat()
            if outcome.lost is not None:
                assert rank not in self.told, "a loss is reported once"
                self.told[rank] = outcome.lost
        self.now += self.interval
