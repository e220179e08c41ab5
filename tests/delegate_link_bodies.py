"""What runs on the hosts of tests/test_delegate_links.py: two engines joined by links."""

import ctypes
import struct
import sys
import time
from collections import deque
from pathlib import Path

from delegate_lab import CALM, SECRET
from link_bodies import meet, receive

from adaptra import _C

sys.path.append(str(Path(__file__).parent / "links"))
from linked_hosts import change_links

SIZE = 1 << 20
WINDOW = 24
PATIENCE = 40.0


def until_several_connections(rank, addresses, change, control):
    """Messages from rank 0 to rank 1, after a while over changed links, until there are several connections.

    Returns how many messages there were, and how many connections in the end.
    """
    engine = _C.Engine(rank, 2, SECRET, **CALM)
    connection = meet(rank, addresses[0])
    connection.sendall(struct.pack("<H", engine.add_tcp_path(addresses[rank])))
    (port,) = struct.unpack("<H", receive(connection, 2))
    engine.set_peer(1 - rank, [(addresses[1 - rank], port)])
    engine.start()
    engine.reserve(1 - rank, SIZE, WINDOW)
    count = _send(engine, change, control) if rank == 0 else _receive(engine)
    # Whoever closes first ends the other's connections.
    connection.sendall(b"x")
    receive(connection, 1)
    used = max(counters["connections"] for *_, counters in engine.statistics())
    engine.close("the test is over", 0.5)
    return [count, used]


def _send(engine, change, control):
    """The last message begins with a 1; how many there were."""
    pending = deque()
    count, is_last, until = 0, 0, time.monotonic() + PATIENCE
    while not is_last:
        if count == WINDOW and change:
            change_links(control, change)
        widest = max((counters["connections"] for *_, counters in engine.statistics()), default=0)
        is_last = int(widest > 1 or time.monotonic() > until)
        message = engine.allocate(SIZE)
        ctypes.memmove(message.address, struct.pack("<BI", is_last, count), 5)
        pending.append(engine.send(1, False, message, SIZE, time.monotonic()))
        count += 1
        if len(pending) == WINDOW or is_last:
            _finish(pending.popleft())
    while pending:
        _finish(pending.popleft())
    return count


def _receive(engine):
    """How many messages came, in order and each once."""
    pending = deque(engine.receive(0, False, SIZE) for _ in range(WINDOW))
    count, is_last = 0, 0
    while not is_last:
        request = pending.popleft()
        _finish(request)
        is_last, number = struct.unpack("<BI", ctypes.string_at(request.memory.address, 5))
        assert number == count
        count += 1
        engine.release(request)
        pending.append(engine.receive(0, False, SIZE))
    return count


def _finish(request):
    assert request.wait(PATIENCE), "nothing came"
    assert request.error is None, request.error
