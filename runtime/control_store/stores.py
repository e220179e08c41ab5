"""The key-value stores of torch.distributed that carry the control plane."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeVar

from torch.distributed import DistError, DistNetworkError, Store, TCPStore

from adaptra.runtime.control_store import spare_clients
from adaptra.runtime.control_store.forked_children import connections_to
from adaptra.runtime.control_store.spare_clients import client_of, cloned, give_back, hang_up, over

T = TypeVar("T")

RECONNECT: Final = timedelta(seconds=2)
"""The time in which a client whose connection broke tries to reach the store again; it takes up to twice as long."""

_REFUSALS: Final = 6
_REFUSED_SECONDS: Final = 0.2
"""Seconds between two attempts to reach a host that refuses connections."""


def clone(store: Store) -> Store:
    """Return another client of the same store, because a blocking request on a client blocks every other user of that
    client.

    A client of the job's store is one of its spare clients if there is any: its user gives it back, see
    :mod:`.spare_clients`.
    """
    taken = spare_clients.take(store)
    return over(store, cloned(client_of(store))) if taken is None else taken


def get_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Return the values of keys, in their order, once all are set. It costs two answers of the store for any number of keys."""
    return store.multi_get(list(keys)) if keys else []  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType] - as above


def innermost(store: Store) -> Store:
    """Return the store that prefixes and signatures lie around."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def rank_0_has(store: Store) -> bool:
    """Return True if rank 0's process hosts the store, as torch sets it up from the launcher's environment.

    False if an agent of torchrun hosts it, or whoever else made it.
    """
    found = innermost(store)
    is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return isinstance(found, TCPStore) and not is_of_agent and os.environ.get("MASTER_PORT") == str(found.port)


def own_address(store: Store) -> str | None:
    """Return the address of this host from which it reaches the store's host, or None for a store that has none.

    It is that of a connection that exists, since looking up a name again may take long.
    """
    for number, _ in sorted(connections_to(store)):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            return str(one.getsockname()[0]).removeprefix("::ffff:")
    return None


def _check_not_refused(store: Store) -> None:
    """Raise an error if the store's host refuses connections for a while, as it does once the process has ended."""
    client = innermost(store)
    if not isinstance(client, TCPStore):
        return
    for attempt in range(_REFUSALS):
        try:
            socket.create_connection((client.host, client.port), RECONNECT.total_seconds()).close()
        except ConnectionRefusedError as error:
            if attempt == _REFUSALS - 1:
                raise DistNetworkError(f"{client.host}:{client.port} refuses connections") from error
            time.sleep(_REFUSED_SECONDS)
        except OSError:  # the client says more of it
            return
        else:
            return


def renewed(client: Store) -> Store:
    """Return another connection to the store of a client whose connection broke: a spare one that answers, or a new one.

    Raises:
        torch.distributed.DistError: The store can't be reached.
    """
    timeout: timedelta = client.timeout  # pyright: ignore[reportAttributeAccessIssue] - torch's annotations lack it
    while (connection := spare_clients.take_free(client)) is not None and not _answers(connection):
        pass
    if connection is None:
        _check_not_refused(client)
        client.set_timeout(RECONNECT)
        connection = spare_clients.reopened(client)
    connection.set_timeout(timeout)
    return connection


def _answers(client: Store) -> bool:
    try:
        client_of(client).check(["any"])
    except DistNetworkError:
        return False
    return True


def error_of_store(error: BaseException) -> DistError | None:
    """Return the failure of a request to the store that an error is or was raised from; None if there is none."""
    found = error if isinstance(error, DistError) else error.__cause__
    return found if isinstance(found, DistError) else None


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

    def give_up(self, error: DistError) -> None:
        """End the connection for good: a request that is stuck raises this error, and so does every later one."""
        self._lost = error
        hang_up(self._client)

    def interrupt(self) -> None:
        """End the connection, so that a request that is stuck is made again over another one."""
        hang_up(self._client)

    def close(self) -> None:
        """Give the client back, once nobody makes a request any more. May be called again."""
        with self._lock:
            if self._lost is None:
                self._lost = DistError("this connection is closed")
                give_back(self._client)

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
