"""A control store in memory that counts what each rank asks of it."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError


class CountingStore:
    """A store in memory that counts what ranks ask of it. :meth:`of` is the client of one rank.

    Attributes:
        values: The values by key.
        queues: The values of queues by name.
        requests: Requests by rank and method.
        bytes: Bytes of keys and values by rank, of requests and answers together.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.requests: dict[int, Counter[str]] = {}
        self.bytes: Counter[int] = Counter()
        self.lock = threading.RLock()
        self.waiting: dict[str, list[threading.Event]] = {}

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
    """The methods of torch's stores that ranks use. Any thread may call them."""

    def __init__(self, store: CountingStore, rank: int) -> None:
        self._store = store
        self._rank = rank

    def _count(self, method: str, *parts: str | bytes) -> None:
        self._store.requests[self._rank][method] += 1
        self._store.bytes[self._rank] += sum(len(part if isinstance(part, bytes) else part.encode()) for part in parts)

    def _put(self, key: str, value: bytes) -> None:
        self._store.values[key] = value
        for event in self._store.waiting.pop(key, ()):
            event.set()

    def set(self, key: str, value: str) -> None:
        with self._store.lock:
            self._count("set", key, value)
            self._put(key, value.encode())

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        with self._store.lock:
            self._count("multi_set", *keys, *values)
            for key, value in zip(keys, values, strict=True):
                self._put(key, value.encode())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with self._store.lock:
            found = [self._store.values[key] for key in keys]
            self._count("multi_get", *keys, *found)
            return found

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait as a client of torch does. A wait is counted once, however often it is repeated."""
        deadline = time.monotonic() + timeout.total_seconds()
        with self._store.lock:
            if keys != self._waited:
                self._count("wait", *keys)
            self._waited = keys
        for key in keys:
            with self._store.lock:
                if key in self._store.values:
                    continue
                event = threading.Event()
                self._store.waiting.setdefault(key, []).append(event)
            if not event.wait(max(0.0, deadline - time.monotonic())):
                raise DistStoreError(f"wait timeout, keys: {keys}")

    _waited: list[str] | None = None

    def check(self, keys: list[str]) -> bool:
        with self._store.lock:
            self._count("check", *keys)
            return all(key in self._store.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._store.lock:
            found = self._store.values.get(key)
            if (b"" if found is None else found) == expected.encode():
                self._put(key, desired.encode())
                found = desired.encode()
            found = expected.encode() if found is None else found
            self._count("compare_set", key, expected, desired, found)
            return found

    def get(self, key: str) -> bytes:
        with self._store.lock:
            found = self._store.values[key]
            self._count("get", key, found)
            return found

    def delete_key(self, key: str) -> bool:
        with self._store.lock:
            self._count("delete_key", key)
            return self._store.values.pop(key, None) is not None

    def queue_push(self, key: str, value: str) -> None:
        with self._store.lock:
            self._count("queue_push", key, value)
            self._store.queues.setdefault(key, deque()).append(value.encode())

    def queue_pop(self, key: str) -> bytes:
        """Take the first value of a queue that has one."""
        with self._store.lock:
            found = self._store.queues[key].popleft()
            self._count("queue_pop", key, found)
            return found

    def add(self, key: str, amount: int) -> int:
        with self._store.lock:
            number = int(self._store.values.get(key, b"0")) + amount
            self._put(key, str(number).encode())
            self._count("add", key, str(number))
            return number
