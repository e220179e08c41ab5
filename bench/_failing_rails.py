"""Messages over RDMA whose paths fail, in the lab of ``tests/rxe``: the part of ``failover.py`` that runs in it."""

from __future__ import annotations

import sys
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "rxe")]
import inside
import rdma_failures
from _lab_hosts import swap
from _streams import PAUSE, SIZE, Stream, holds_within, receive_all

from adaptra import _C

RAILS = 2
START = 120.0
"""Seconds for processes to begin or to end, on a machine that is busy."""
TIMING: dict[str, Any] = {"heartbeat": 0.2, "silence": 0.8, "healthy_for": 1.0, "lost_after": 10.0, "handshake": 3.0}
ENOUGH = 16 * SIZE
"""Bytes by which a rail is known to carry the messages."""
FAILS_WITHIN = 4.0
"""Seconds after which nothing has failed: long after the bound."""
TRIES = 20
STOP = Path("/tmp/stop")


def measure(rounds: int) -> dict[str, list[float]]:
    """Outside of all hosts: the longest time between two arrivals at each failure, by its kind, in seconds.

    Where the receiver is stopped the time runs from its going on.
    """
    spans: list[tuple[str, float, float]] = []
    with inside.on_hosts(2, exchange) as processes:
        for process in processes:
            process.wait_for("started", START)
        for number, (kind, breakages) in product(range(rounds), rdma_failures.KINDS.items()):
            for _ in range(TRIES):
                span = broken(breakages[number % len(breakages)], processes[1], kind)
                if span is not None:
                    spans.append((kind, *span))
                    break
            else:
                raise AssertionError(f"{kind}: no path fails")
        STOP.touch()
        arrived: list[float] = processes[1].result(START)
        processes[0].result(START)
    found: dict[str, list[float]] = {kind: [] for kind in rdma_failures.KINDS}
    for kind, begun, ended in spans:
        moments = [begun, *(moment for moment in arrived if begun < moment < ended)]
        found[kind].append(max(after - before for before, after in pairwise(moments)))
    return found


def broken(breakage: rdma_failures.Breakage, process: inside.Process, kind: str) -> tuple[float, float] | None:
    """Break the first rail while it carries messages, and wait for the others to carry them: when that began and ended.

    None if nothing has failed: while the cable is opened to change a packet, an acknowledgement may be lost. Then the packet is
    one that is sent again, whose contents nobody looks at. What arrives is compared all the same.
    """
    assert carry(range(1), START), f"before {kind}: the first rail carries nothing"
    begun = time.monotonic()
    with breakage(process, 1, 0) as is_broken:
        assert is_broken, f"{kind}: the first rail carries nothing"
        others = range(1, RAILS)
        if kind == "a receiver that stops":
            begun, others = time.monotonic(), range(RAILS)
        return (begun, time.monotonic()) if carry(others, FAILS_WITHIN) else None


def carry(rails: range, seconds: float) -> bool:
    """Whether these rails carry some more messages of host 0 within this time."""

    def carried() -> int:
        return sum(int(Path(f"/sys/class/net/p0_{rail}/statistics/rx_bytes").read_text()) for rail in rails)

    enough = carried() + ENOUGH
    return holds_within(seconds, lambda: carried() >= enough)


def exchange(host: int) -> list[float]:
    """On a host: send messages from 0 to 1 until asked to stop; when each arrived, at host 1."""
    engine = _C.Engine(host, 2, bytes(32), **TIMING)
    mine = [(f"10.9.{rail}.{host + 1}", f"rxe{host}_{rail}") for rail in range(RAILS)]
    ports = [(address, engine.add_verbs_path(device, 1, address)) for address, device in mine]
    engine.set_peer(1 - host, swap(host, ports))
    engine.start()
    print("started", flush=True)
    arrived: list[float] = []
    if host == 0:
        stream = Stream(engine)
        while not STOP.exists():
            time.sleep(PAUSE)
        stream.close()
    else:
        arrived = receive_all(engine)
    engine.close("measured", 1.0)
    return arrived
