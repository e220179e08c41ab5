"""Ranks whose heartbeats a test or a benchmark steps in one thread, on a clock of its own, over a store that counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from adaptra.errors import PeerLostError
from adaptra.runtime.membership.heartbeat import HeartbeatProtocol, HeartbeatTiming
from adaptra.runtime.transports.base import Identity


class CountingStore:
    """A store in memory that counts what ranks ask of it. :meth:`of` is the client of one rank.

    Attributes:
        values: The values by key.
        requests: Requests by rank and method.
        bytes: Bytes of keys and values by rank, of requests and answers together.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: dict[int, Counter[str]] = {}
        self.bytes: Counter[int] = Counter()
        self.changed = threading.Condition()

    def of(self, rank: int) -> Any:
        """The client of one rank."""
        self.requests.setdefault(rank, Counter())
        return _Client(self, rank)

    def forget(self) -> None:
        """Count from zero."""
        self.bytes.clear()
        for counted in self.requests.values():
            counted.clear()

    def most_requests(self) -> int:
        """The requests of the rank that made most."""
        return max(sum(counted.values()) for counted in self.requests.values())


class _Client:
    def __init__(self, store: CountingStore, rank: int) -> None:
        self._store = store
        self._rank = rank

    def _count(self, method: str, *parts: str | bytes) -> None:
        self._store.requests[self._rank][method] += 1
        self._store.bytes[self._rank] += sum(len(part if isinstance(part, bytes) else part.encode()) for part in parts)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._count("multi_set", *keys, *values)
        self._store.values.update(zip(keys, map(str.encode, values), strict=True))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = [self._store.values[key] for key in keys]
        self._count("multi_get", *keys, *found)
        return found

    def check(self, keys: list[str]) -> bool:
        self._count("check", *keys)
        return all(key in self._store.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found = self._store.values.get(key)
        if found == expected.encode():
            found = self._store.values[key] = desired.encode()
        found = expected.encode() if found is None else found
        self._count("compare_set", key, expected, desired, found)
        return found

    def add(self, key: str, amount: int) -> int:
        number = int(self._store.values.get(key, b"0")) + amount
        self._store.values[key] = str(number).encode()
        self._count("add", key, str(number))
        return number


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
