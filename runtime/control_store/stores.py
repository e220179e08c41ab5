"""The key-value stores of torch.distributed that carry the control plane."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeVar

from torch.distributed import DistError, DistNetworkError, Store

T = TypeVar("T")

RECONNECT: Final = timedelta(seconds=2)
"""The time in which a client whose connection broke tries to reach the store again; it takes up to twice as long."""


def clone(store: Store) -> Store:
    """Return another client of the same store, because a blocking request on a client blocks every other user of that
    client.
    """
    return store.clone()  # pyright: ignore[reportAttributeAccessIssue] - torch's annotations lack the method


def renewed(client: Store) -> Store:
    """Return a new connection to the store of a client whose connection broke.

    Raises:
        torch.distributed.DistError: The store can't be reached.
    """
    timeout: timedelta = client.timeout  # pyright: ignore[reportAttributeAccessIssue] - torch's annotations lack it
    client.set_timeout(RECONNECT)
    made = clone(client)
    made.set_timeout(timeout)
    return made


class Connection:
    """A client of a store that reconnects when its connection breaks. Any thread may use it.

    The request at which the break is noticed is repeated, so a request may be made twice. Earlier requests that have no answer,
    such as ``set`` and ``queue_push``, may be lost. Once the store can't be reached every request raises at once.

    Args:
        store: The store to clone.
    """

    def __init__(self, store: Store) -> None:
        self._client = clone(store)
        self._lock = threading.Lock()
        self._lost: DistError | None = None

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._request(lambda client: client.set(key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set."""
        return self._request(lambda client: client.get(key))

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Set several keys, in one message."""
        self._request(lambda client: client.multi_set(keys, values))  # pyright: ignore[reportAttributeAccessIssue, reportUnknownLambdaType]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that are all set."""
        return self._request(lambda client: client.multi_get(keys))

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys are set."""
        return self._request(lambda client: client.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._request(lambda client: client.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if its value is the expected one, where "" means that it is not set, and return its value afterwards."""
        return self._request(lambda client: client.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._request(lambda client: client.delete_key(key))

    def push(self, queue: str, value: str) -> None:
        """Append to a queue."""
        self._request(lambda client: client.queue_push(queue, value))

    def _request(self, make: Callable[[Store], T]) -> T:
        client = self._client
        try:
            return make(client)
        except DistNetworkError:
            return make(self._after(client))

    def _after(self, broken: Store) -> Store:
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if self._client is broken:
                try:
                    self._client = renewed(broken)
                except DistError as error:
                    self._lost = error
                    raise
            return self._client
