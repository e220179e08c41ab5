"""The sockets of this process, for tests that look at connections which code under test has made, or end them."""

import socket
from collections.abc import Iterator
from pathlib import Path


def connected_sockets() -> Iterator[tuple[socket.socket, tuple[str, int], tuple[str, int]]]:
    """Every connected TCP/IPv4 socket of this process, its own address and its peer's; it stays open and its maker's."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found = socket.socket(fileno=int(entry.name))
        except OSError:
            continue  # no socket, or the descriptor that this listing used
        try:
            if found.family == socket.AF_INET and found.type == socket.SOCK_STREAM:
                yield found, found.getsockname(), found.getpeername()
        except OSError:
            continue  # not connected
        finally:
            found.detach()
