"""What runs on the hosts of tests/links/test_links.py; every function takes its rank and returns what it saw."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from linked_hosts import SYSCTLS, change_links

PORT = 5000


def meet(rank: int, address: str) -> socket.socket:
    """A connection between ranks 0 and 1."""
    if rank == 0:
        with socket.create_server((address, PORT)) as listener:
            connection, _ = listener.accept()
    else:
        connection = connect(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(20)
    return connection


def connect(address: str) -> socket.socket:
    """Until somebody listens: a connection that is refused takes a round trip, so this does not spin on a long link."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((address, PORT), timeout=20)


def receive(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes."""
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        assert part, "the connection ended"
        data += part
    return bytes(data)


def how_it_sends(_rank: int) -> list[str]:
    """The congestion control of a new connection, and whether it starts slowly after it was idle."""
    with socket.socket() as connection:
        control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    return [control, (SYSCTLS / "tcp_slow_start_after_idle").read_text().strip()]


def one_way(rank: int, address: str, count: int) -> float | None:
    """The shortest time from rank 0 to 1 and from 1 to 0, by this machine's one clock, in seconds."""
    connection = meet(rank, address)
    shortest = None
    for _ in range(count):
        for source in (0, 1):
            if rank == source:
                connection.sendall(struct.pack("d", time.monotonic()))
            else:
                (sent,) = struct.unpack("d", receive(connection, 8))
                took = time.monotonic() - sent
                shortest = took if shortest is None else min(shortest, took)
    return shortest


def stream(rank: int, address: str, count: int) -> float | None:
    """Rank 0 sends so many bytes to rank 1, which returns the seconds that they took; all of them come as they were."""
    connection = meet(rank, address)
    data = bytes(range(256)) * (count // 256)
    if rank == 0:
        connection.sendall(data)
        receive(connection, 1)
        return None
    started = time.monotonic()
    assert receive(connection, len(data)) == data
    took = time.monotonic() - started
    connection.sendall(b"x")
    return took


def changed_midway(rank: int, address: str, changes: Sequence[str], control: str) -> list[Any]:
    """Ping, changes of the links, ping again: how long each took; an error's name where the connection ended."""
    connection = meet(rank, address)
    found = []
    for change in (None, *changes):
        if rank == 0 and change is not None:
            change_links(control, change)
        started = time.monotonic()
        try:
            if rank == 0:
                connection.sendall(b"x")
            receive(connection, 1)
            if rank == 1:
                connection.sendall(b"x")
        except (ConnectionError, TimeoutError) as error:
            found.append(type(error).__name__)
            connection.close()
            connection = meet(rank, address)
        else:
            if rank == 0:
                found.append(time.monotonic() - started)
    return found


def spread(rank: int, address: str, count: int, gathers: bool) -> float:
    """The seconds in which rank 0 sends so many bytes to each other rank at once, or they to it."""
    if rank:
        with connect(address) as connection:
            connection.settimeout(20)
            began = time.monotonic()
            if gathers:
                connection.sendall(bytes(count))
                connection.shutdown(socket.SHUT_WR)
            received = receive(connection, 1 if gathers else count)
            return time.monotonic() - began if received else 0.0
    with socket.create_server((address, PORT)) as listener:
        connections = [listener.accept()[0] for _ in range(2)]

    def serve(connection: socket.socket) -> None:
        with connection:
            if gathers:
                receive(connection, count)
            connection.sendall(bytes(1 if gathers else count))

    threads = [threading.Thread(target=serve, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0.0


def unheard(rank: int, address: str, control: str) -> list[str] | None:
    """What rank 1 hears of a datagram before, while and after the link is down; and then one of each rail."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
        if rank == 1:
            ours.bind((address, PORT))
            ours.settimeout(20)
            connection = meet(1, "10.77.0.1")
            heard = []
            while (word := ours.recv(100)) != b"end":
                heard.append(word.decode())
            connection.sendall(b"x")
            return heard
        connection = meet(0, "10.77.0.1")
        for word, change in (("before", "0>1/1 down"), ("while", "0>1/1 up"), ("after", "0>1/1 delay=1ms"), ("end", "all up")):
            ours.sendto(word.encode(), (address, PORT))
            change_links(control, change)
        receive(connection, 1)
        return None
