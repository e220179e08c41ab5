"""Clients of the job's store that are open and that nobody uses: what needs one takes it, and gives it back.

torch's store looks up the name of each host that connects to it, and answers nobody meanwhile. Its client does so too. Where a
name server loses a question, that lasts five seconds, in which no rank hears of another. So a process opens its clients once,
before it is part of a job's heartbeats. What is built anew, such as transports and workers, then opens none.

A client that a thread may still wait on is not given back. It ends with its last user, and another is opened beside training.
One that nobody has reserved ends too. What threads have borrowed that are given up ends too: see :class:`Borrower`.
"""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from os import dup
from typing import Final

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store

from adaptra.runtime.control_store.forked_children import connections_to, end_connections

Connections = set[tuple[int, str]]
"""Connections by descriptor, with the system's name of each."""


class Part(PrefixStore):
    """The keys of a store under a prefix, which can be had over another client too.

    Args:
        prefix: The prefix.
        store: The store.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(prefix, store)
        self.prefix = prefix
        self.store = store

    def over(self, client: Store) -> Part:
        """Return the same keys over another client."""
        return Part(self.prefix, over(self.store, client))

    def clone(self) -> Part:
        """Return the same keys over a new connection."""
        return self.over(cloned(client_of(self)))


def cloned(client: Store) -> Store:
    """Return a new client like one, as it was opened."""
    with _opening:
        before = connections_to(client)
        made: Store = client.clone()  # pyright: ignore[reportAttributeAccessIssue] - torch's annotations lack the method
        _connections[made] = connections_to(client) - before
    return _taken(made)


def over(store: Store, client: Store) -> Store:
    """Return the same keys of a store over another client: prefixes and signatures lie around it."""
    again = getattr(store, "over", None)
    return client if again is None else again(client)


def client_of(store: Store) -> Store:
    """Return the client that a store's prefixes and signatures lie around, as it was opened."""
    while hasattr(store, "over"):
        store = store.underlying_store if not isinstance(store, Part) else store.store  # pyright: ignore[reportAttributeAccessIssue]
    return store


class Borrower:
    """Threads that take clients for one purpose, and may be given up while they still wait.

    One that waits for the store fails then, and so does one that needs it later. So none holds a client that others need, nor
    waits for the store when the process ends. One that waits for anything else is left to itself.
    """

    def __init__(self) -> None:
        self._is_given_up = False

    @staticmethod
    def current() -> Borrower | None:
        """Return the borrower that this thread belongs to, if any."""
        return getattr(_thread, "borrower", None)

    @contextmanager
    def here(self) -> Generator[None]:
        """Have this thread belong to it."""
        _thread.borrower = self
        try:
            yield
        finally:
            del _thread.borrower

    def give_up(self) -> None:
        """End the connections of all clients that its threads have taken and not given back, or take from now on."""
        with _lock:
            self._is_given_up = True
            taken = [client for client, borrower in _borrowers.items() if borrower is self]
        for client in taken:
            hang_up(client)

    def note(self, client: Store) -> None:
        """Note that one of its threads has taken a client.

        Raises:
            torch.distributed.DistError: It has been given up.
        """
        with _lock:
            _borrowers[client] = self
            is_given_up = self._is_given_up
        if is_given_up:
            hang_up(client)
            raise DistError("this thread has been given up, and uses the store no more")


@dataclass(slots=True)
class _Clients:
    """The clients of one job's store.

    Attributes:
        address: The store's host and port; None for a store without.
        groups: The client by which process groups meet. Others are made as it was.
        free: Those that nobody uses.
        lent: Those in use.
        reserved: The number of clients, free and lent, that are kept open.
    """

    address: tuple[str, int] | None
    groups: Store
    free: list[Store] = field(default_factory=list)
    lent: weakref.WeakSet[Store] = field(default_factory=weakref.WeakSet[Store])
    reserved: int = 0

    @property
    def excess(self) -> int:
        """How many more clients there are than are reserved."""
        return len(self.free) + len(self.lent) - self.reserved


_lock = threading.Lock()
_opening = threading.Lock()
_connections: Final[weakref.WeakKeyDictionary[Store, Connections]] = weakref.WeakKeyDictionary()
"""The connection of each client that was opened here."""
_pools: Final[dict[tuple[str, int] | None, _Clients]] = {}
"""The pools in use, by the store's address."""
_borrowers: Final[weakref.WeakKeyDictionary[Store, Borrower]] = weakref.WeakKeyDictionary()
"""Who has taken a client last, if it was a borrower."""
_thread: Final = threading.local()


class Reservation:
    """Clients that stay open until :meth:`end`, or until the last reference to this.

    Args:
        count: The number of them.
    """

    def __init__(self, count: int) -> None:
        pool = _pool_of_job()
        with _lock:
            pool.reserved += count
        self._end = weakref.finalize(self, _release, pool, count)
        self._end.atexit = False
        self.fill()

    def fill(self) -> None:
        """Open clients in the place of those that have ended with a thread that waited on them. Any thread may call it."""
        if (found := self._end.peek()) is None:
            return
        pool: _Clients = found[2][0]  # which this may not keep alive
        while pool.excess < 0:
            made = cloned(pool.groups)
            with _lock:
                pool.free.append(made)

    def end(self) -> None:
        """Close what nobody uses. May be called again."""
        self._end()


def take(store: Store) -> Store | None:
    """Return a client for a store's keys, which the caller gives back; None if the store is not the job's."""
    pool = _pool_of(store)
    return None if pool is None else over(store, _lend(pool, _free(pool) or cloned(pool.groups)))


def take_free(store: Store) -> Store | None:
    """Return a client as :func:`take` does, but for one that is not open yet."""
    pool = _pool_of(store)
    client = None if pool is None else _free(pool)
    return None if pool is None or client is None else over(store, _lend(pool, client))


def reopened(broken: Store) -> Store:
    """Return a new client in the place of a broken one, for the same keys. If that was taken, it can be given back."""
    client = cloned(client_of(broken))
    pool = _pools.get(_address(client))
    return over(broken, client if pool is None else _lend(pool, client))


def hang_up(store: Store) -> None:
    """End the connection of a client that was opened here, so that a request under way on it fails at once."""
    end_connections(_connections.get(client_of(store), set()))


def give_back(store: Store) -> None:
    """Return a client that no thread uses any more. A store that was not taken stays as it is."""
    client = client_of(store)
    pool = _pools.get(_address(client))
    if pool is None or client not in pool.lent:
        return
    client.set_timeout(_timeout(pool.groups))
    with _lock:
        if pool.excess <= 0 and client in pool.lent:
            pool.free.append(client)
        pool.lent.discard(client)
        _borrowers.pop(client, None)


def client_of_groups() -> Store | None:
    """Return the client by which process groups meet, one after the other; None if none is reserved.

    It is never lent, because a group refers to it for life.
    """
    pool = _pools.get(_address(_job_store()))
    if pool is None:
        return None
    if not _is_open(_connections.get(pool.groups, set())):
        pool.groups = _free(pool) or cloned(pool.groups)
    return _taken(pool.groups)


def _release(pool: _Clients, count: int) -> None:
    with _lock:
        pool.reserved -= count
        while pool.free and pool.excess > 0:
            pool.free.pop()
        if not pool.reserved and _pools.get(pool.address) is pool:
            del _pools[pool.address]


def _pool_of_job() -> _Clients:
    job = _job_store()
    pool = _pools.get(_address(job))
    if pool is None or not _is_open(_connections.get(pool.groups, set())):
        pool = _Clients(_address(job), job)
        pool.groups = cloned(job)
        _pools[pool.address] = pool
    return pool


def _free(pool: _Clients) -> Store | None:
    dead: list[Store] = []  # they end without the lock
    with _lock:
        while pool.free and not _is_open(_connections.get(pool.free[-1], set())):
            dead.append(pool.free.pop())
        return pool.free.pop() if pool.free else None


def _lend(pool: _Clients, client: Store) -> Store:
    with _lock:
        pool.lent.add(client)
    return _taken(client)


def _taken(client: Store) -> Store:
    if (borrower := Borrower.current()) is not None:
        borrower.note(client)
    return client


def _pool_of(store: Store) -> _Clients | None:
    """Return the pool whose clients a store is had over; None if it is not the job's."""
    pool, client = _pools.get(_address(store)), client_of(store)
    if pool is None or client in pool.lent:
        return pool
    # A pool may outlive its job's default group until the collector runs. Then no other store can be the job's.
    return pool if dist.group.WORLD is not None and client is _job_store() else None


def _job_store() -> Store:
    assert dist.group.WORLD is not None, "the job's ranks have joined"
    return dist.group.WORLD.get_group_store()


def _address(store: Store) -> tuple[str, int] | None:
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return None if host is None or port is None else (host, port)


def _timeout(store: Store) -> timedelta:
    return store.timeout  # pyright: ignore[reportAttributeAccessIssue] - torch's annotations lack it


def _is_open(connections: Connections) -> bool:
    """Return False if the other end of a connection has closed it, as far as this end knows."""
    return all(_has_silent_peer(number) for number, _ in connections)


def _has_silent_peer(number: int) -> bool:
    try:
        with socket.socket(fileno=dup(number)) as one:
            one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False  # the end of the connection, or an answer that nobody has asked for
