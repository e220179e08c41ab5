"""Numbered messages of one size from rank 0 to rank 1, one after the other: what benchmarks watch while paths fail."""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from ctypes import memmove, string_at

from adaptra import _C
from adaptra.runtime.transports.base import ChannelClass

SIZE, WINDOW, PAUSE = 16384, 8, 0.002
TIMEOUT = 30.0
NUMBER = struct.Struct("<q")
EMPTY = bytes(SIZE - NUMBER.size)
"""What follows a message's number."""
LAST = -1


class Stream:
    """Messages from rank 0 to rank 1, numbered, one after the other, from a thread of its own."""

    def __init__(self, engine: _C.Engine) -> None:
        self._engine = engine
        self._free = deque(engine.allocate(SIZE) for _ in range(WINDOW))
        self._under_way: deque[tuple[_C.Request, _C.Memory]] = deque()
        self._is_over = False
        self.posted: list[float] = []
        self.acknowledged = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the last message, and wait until all have arrived."""
        self._is_over = True
        self._thread.join()
        self._post(LAST)
        while self._under_way:
            self._take_back()

    def _run(self) -> None:
        while not self._is_over:
            self._post(len(self.posted))
            time.sleep(PAUSE)

    def _post(self, number: int) -> None:
        if not self._free:
            self._take_back()
        memory = self._free.popleft()
        memmove(memory.address, NUMBER.pack(number), NUMBER.size)
        now = time.monotonic()
        self._under_way.append((self._engine.send(1, ChannelClass.FORWARD, memory, SIZE, now), memory))
        self.posted.append(now)

    def _take_back(self) -> None:
        request, memory = self._under_way.popleft()
        assert request.wait(TIMEOUT) and request.error is None, request.error
        self._free.append(memory)
        self.acknowledged += 1


def receive_all(engine: _C.Engine) -> list[float]:
    """Rank 1: when each message arrived, by number, until the last."""
    engine.reserve(0, SIZE, WINDOW)
    waiting = deque(engine.receive(0, ChannelClass.FORWARD, SIZE) for _ in range(WINDOW))
    arrived: list[float] = []
    while True:
        request = waiting.popleft()
        assert request.wait(TIMEOUT) and request.error is None, request.error
        memory = request.memory
        assert memory is not None, "an arrived message lies somewhere"
        got = string_at(memory.address, SIZE)
        (number,) = NUMBER.unpack_from(got)
        assert got[NUMBER.size :] == EMPTY, f"message {number} has changed on its way"
        engine.release(request)
        if number == LAST:
            return arrived
        assert number == len(arrived), f"message {number} came in place of {len(arrived)}"
        arrived.append(request.moment)
        waiting.append(engine.receive(0, ChannelClass.FORWARD, SIZE))


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    assert holds_within(TIMEOUT, holds), what


def holds_within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold within this time, looking as often as messages are sent."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(PAUSE)
    return True
