"""Sockets that a rank's forked children, such as the workers of a DataLoader, must close.

As long as any process has a socket open, its peer does not see it end. Children that outlive a killed rank would make it look
alive to the others. ``csrc/delegate/system/forks.h`` does the same for the delegate's own sockets. The sockets here are those
that torch.distributed opens for a job: gloo's, and those of the job's store.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Final

from torch.distributed import Store

_DESCRIPTORS: Final = Path("/proc/self/fd")

_lock = threading.Lock()
_opened: dict[int, str] = {}
_ports: set[int] = set()


@contextlib.contextmanager
def kept_from_children() -> Generator[None, None, None]:
    """Have children that are forked from now on close the connections that are opened within this context."""
    before = _sockets()
    yield
    with _lock:
        _opened.update((number, name) for number, name in _sockets().items() if before.get(number) != name)


def keep_store_from_children(store: Store) -> None:
    """Have children that are forked from now on close all connections to the store, and its listener."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store  # pyright: ignore[reportAttributeAccessIssue] - torch's annotations lack it
    port = getattr(store, "port", None)
    if isinstance(port, int):
        with _lock:
            _ports.add(port)


def connections_to(store: Store) -> set[tuple[int, str]]:
    """Return this process's connections to a store as a client: the descriptor and the system's name of each."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store  # pyright: ignore[reportAttributeAccessIssue] - torch's annotations lack it
    port = getattr(store, "port", None)
    return {(number, name) for number, name in _sockets().items() if isinstance(port, int) and _ports_of(number)[1:] == [port]}


def end_connections(connections: set[tuple[int, str]]) -> None:
    """End connections that other code still owns, so that every wait for an answer on them fails."""
    now = _sockets()
    for number, name in connections:
        if now.get(number) == name:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
                one.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """Return this process's sockets by descriptor, with the system's names: numbers are reused, names are not."""
    sockets: dict[int, str] = {}
    with contextlib.suppress(OSError):  # a system without /proc: children keep inherited sockets
        for entry in _DESCRIPTORS.iterdir():
            with contextlib.suppress(OSError):  # closed since
                name = str(entry.readlink())
                if name.startswith("socket:"):
                    sockets[int(entry.name)] = name
    return sockets


def _ports_of(number: int) -> list[int]:
    """Return the ports of this end of a socket and of the other, as far as it has any."""
    ports: list[int] = []
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as duplicate:
        if duplicate.family in (socket.AF_INET, socket.AF_INET6):
            ports.append(duplicate.getsockname()[1])
            ports.append(duplicate.getpeername()[1])
    return ports


def _give_up() -> None:
    """Replace each of these sockets in a forked child by a null device, because the owner of the number may still close it."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number, name in _sockets().items():
        if _opened.get(number) == name or not _ports.isdisjoint(_ports_of(number)):
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=lambda: (_give_up(), _lock.release()))
