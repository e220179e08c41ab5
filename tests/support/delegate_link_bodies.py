"""What runs on the hosts of tests/runtime/transports/delegate/test_delegate_links.py: two engines joined by links."""

import ctypes
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from delegate_lab import CALM, SECRET
from link_bodies import meet, receive
from linked_hosts import change_links
from own_sockets import connected_sockets

from adaptra import _C
from adaptra.runtime.transports.base import ChannelClass

SIZE = 1 << 20
WINDOW = 24
TIMEOUT = 40.0


def has_several(engine: _C.Engine, _: object) -> bool:
    """Whether a channel has several connections."""
    return any(counters["connections"] > 1 for *_, counters in engine.statistics())


def is_under_bbr(_: object, ports: set[int]) -> bool:
    """Whether a connection that joins one of these ports is under BBR."""
    controls = {
        found.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
        for found, (_, own), (_, peer) in connected_sockets()
        if {own, peer} & ports
    }
    assert controls, "no connection of the engine"
    return b"bbr" in controls


GOALS = {"several": has_several, "bbr": is_under_bbr}


def until(rank: int, addresses: Sequence[str], change: str, control: str, goal: str) -> list[Any]:
    """Messages from rank 0 to rank 1, after a while over changed links, until rank 0 sees the goal, or for too long.

    Returns how many messages there were, and on rank 0 whether it saw the goal before the links changed and in the end.
    """
    engine = _C.Engine(rank, 2, SECRET, **CALM)
    connection = meet(rank, addresses[0])
    own = engine.add_tcp_path(addresses[rank])
    connection.sendall(struct.pack("<H", own))
    (port,) = struct.unpack("<H", receive(connection, 2))
    engine.set_peer(1 - rank, [(addresses[1 - rank], port)])
    engine.start()
    engine.reserve(1 - rank, SIZE, WINDOW)
    found = _send(engine, change, control, lambda: GOALS[goal](engine, {own, port})) if rank == 0 else [_receive(engine)]
    # Whoever closes first ends the other's connections.
    connection.sendall(b"x")
    receive(connection, 1)
    engine.close("the test is over", 0.5)
    return found


def _send(engine: _C.Engine, change: str, control: str, has_come: Callable[[], bool]) -> list[Any]:
    """The last message begins with a 1; how many there were, and whether the goal was seen before and after the change."""
    pending: deque[_C.Request] = deque()
    count, is_last, was_there, is_there, deadline = 0, 0, False, False, time.monotonic() + TIMEOUT
    while not is_last:
        if count == WINDOW and change:
            was_there = has_come()
            change_links(control, change)
        is_there = count >= WINDOW and has_come()
        is_last = int(is_there or time.monotonic() > deadline)
        message = engine.allocate(SIZE)
        ctypes.memmove(message.address, struct.pack("<BI", is_last, count), 5)
        pending.append(engine.send(1, ChannelClass.FORWARD, message, SIZE, time.monotonic()))
        count += 1
        if len(pending) == WINDOW or is_last:
            _finish(pending.popleft())
    while pending:
        _finish(pending.popleft())
    return [count, was_there, is_there]


def _receive(engine: _C.Engine) -> int:
    """How many messages came, in order and each once."""
    pending = deque(engine.receive(0, ChannelClass.FORWARD, SIZE) for _ in range(WINDOW))
    count, is_last = 0, 0
    while not is_last:
        request = pending.popleft()
        _finish(request)
        assert request.memory is not None
        is_last, number = struct.unpack("<BI", ctypes.string_at(request.memory.address, 5))
        assert number == count
        count += 1
        engine.release(request)
        pending.append(engine.receive(0, ChannelClass.FORWARD, SIZE))
    return count


def _finish(request: _C.Request) -> None:
    assert request.wait(TIMEOUT), "nothing came"
    assert request.error is None, request.error
