"""How long messages of the delegate over TCP stand still when a path fails, per kind of failure.

Rank 0 hands a message of 16 KiB over every two milliseconds; what it sends to rank 1 crosses one of two links on this machine's
loopback, proxies that fail to order. A link fails while it carries the messages; measured are the seconds from then until a
message that was handed over after the failure has arrived. A receiver that stops is the whole process of rank 1: there the time
runs from its going on. ``--rounds`` failures of each kind; the delegate's own timing; beside it the bound of one second.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from ctypes import memmove, string_at
from pathlib import Path
from statistics import median

from _ranks import run_on_ranks
from _table import Row, parser, print_rows

from adaptra import _C
from adaptra.runtime.transports.delegate_engine import Timing, listen, start_engine
from adaptra.runtime.transports.groups import new_group

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from delegate_lab import Link, behind_links

BOUND = 1.0
HOSTS = ("127.0.0.2", "127.0.0.3")
SIZE, WINDOW, PAUSE = 16384, 8, 0.002
PATIENCE = 30.0
NUMBER = struct.Struct("<q")
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
        self._under_way.append((self._engine.send(1, False, memory, SIZE, now), memory))
        self.posted.append(now)

    def _take_back(self) -> None:
        request, memory = self._under_way.popleft()
        assert request.wait(PATIENCE) and request.error is None, request.error
        self._free.append(memory)
        self.acknowledged += 1


def receive_all(engine: _C.Engine) -> list[float]:
    """Rank 1: when each message arrived, by number, until the last."""
    engine.reserve(0, SIZE, WINDOW)
    waiting = deque(engine.receive(0, False, SIZE) for _ in range(WINDOW))
    arrived: list[float] = []
    while True:
        request = waiting.popleft()
        assert request.wait(PATIENCE) and request.error is None, request.error
        memory = request.memory
        assert memory is not None, "an arrived message lies somewhere"
        (number,) = NUMBER.unpack(string_at(memory.address, NUMBER.size))
        engine.release(request)
        if number == LAST:
            return arrived
        assert number == len(arrived), f"message {number} came in place of {len(arrived)}"
        arrived.append(request.moment)
        waiting.append(engine.receive(0, False, SIZE))


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    """Wait until something holds, looking as often as messages are sent."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(PAUSE)


def stop(receiver: int) -> float:
    """Stop a process for longer than the other side bears its silence; when it went on."""
    os.kill(receiver, signal.SIGSTOP)
    time.sleep(2 * Timing().silence)
    os.kill(receiver, signal.SIGCONT)
    return time.monotonic()


def fail(kind: str, link: Link, receiver: int) -> tuple[float, Callable[[], None]]:
    """Let a failure begin; when that was, and what ends it."""

    def nothing() -> None:
        pass

    begun = time.monotonic()
    match kind:
        case "connection reset":
            link.reset()
        case "corruption":
            link.corrupt()
        case "link down":
            link.vanish()
            return begun, link.come_back
        case "all lost":
            link.is_silent = True
            return begun, lambda: setattr(link, "is_silent", False)
        case "receiver stopped":
            return stop(receiver), nothing
        case _:
            raise ValueError(kind)
    return begun, nothing


KINDS = ("connection reset", "corruption", "link down", "all lost", "receiver stopped")


def measure(rank: int, rounds: int) -> dict[str, list[float]] | None:
    """One rank: seconds of each failure, by its kind."""
    store = new_group([0, 1], "gloo").get_group_store()
    links: list[Link] = []
    engine = start_engine(rank, 2, store, HOSTS, Timing(), listen if rank else behind_links(links)).engine
    if rank == 1:
        store.set("receiver", str(os.getpid()))
        store.set("arrivals", json.dumps(receive_all(engine)))
        engine.close("measured", 1.0)
        return None
    receiver = int(store.get("receiver"))
    stream = Stream(engine)
    failures: list[tuple[str, float]] = []
    for _ in range(rounds):
        for kind in KINDS:
            enough = links[0].carried + 16 * SIZE
            wait_until("messages don't return to the better link", lambda enough=enough: links[0].carried >= enough)
            begun, end = fail(kind, links[0], receiver)
            failures.append((kind, begun))
            later = len(stream.posted) + WINDOW
            wait_until(f"after {kind} nothing is acknowledged", lambda later=later: stream.acknowledged > later)
            end()
    stream.close()
    arrived = json.loads(store.get("arrivals"))
    engine.close("measured", 1.0)
    for link in links:
        link.close()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for kind, begun in failures:
        first = next(number for number, posted in enumerate(stream.posted) if posted > begun)
        found[kind].append(arrived[first] - begun)
    return found


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=5, help="failures of each kind")
    given = arguments.parse_args()
    rows: list[Row] = []
    for kind, seconds in run_on_ranks(measure, 2, given.rounds).items():
        rows.append(Row(f"{kind}, median", median(seconds), BOUND, "s", len(seconds)))
        rows.append(Row(f"{kind}, worst", max(seconds), BOUND, "s", len(seconds)))
    print_rows("Time to the next path over TCP", rows, baseline="bound", as_json=given.json)


if __name__ == "__main__":
    main()
