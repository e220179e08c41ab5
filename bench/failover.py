"""How long messages of the delegate stand still when a path fails, per kind of failure.

    bench/failover.py                           over TCP
    bench/failover.py --lab-kernel FILE         over RDMA too, in the lab of tests/rxe

Over TCP rank 0 hands a message of 16 KiB over every two milliseconds. What it sends to rank 1 crosses one of two links on
this machine's loopback, proxies that fail on command. A link fails while it carries the messages. Measured are the seconds
from then until a message has arrived that was handed over after the failure. Where a receiver stops, that is the whole
process of rank 1, and the time runs from when it goes on. There are ``--rounds`` failures of each kind, under the delegate's
own timing; beside them stands the bound of one second.

Over RDMA the same messages cross soft-RoCE devices whose cables and packets are disturbed. Measured is the longest time
between two arrivals. The bound is a second more than after which a queue pair gives up.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from _ranks import run_on_ranks
from _streams import SIZE, WINDOW, Stream, receive_all, wait_until
from _table import Row, parser, print_rows

from adaptra.runtime.transports.delegate.engine import Timing, listen, start_engine
from adaptra.runtime.transports.process_groups import job_store

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "rxe")]
import _failing_rails
import inside
import lab
from delegate_lab import Link, behind_links

BOUND = 1.0
BOUND_OF_RAILS = 1.47
"""A second more than after which a queue pair gives up a packet."""
HOSTS = ("127.0.0.2", "127.0.0.3")


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
    store = job_store()
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


def rows_of(found: dict[str, list[float]], wire: str, bound: float) -> Iterator[Row]:
    """Of each kind of failure the median and the worst."""
    for kind, seconds in found.items():
        yield Row(f"{wire}: {kind}, median", median(seconds), bound, "s", len(seconds))
        yield Row(f"{wire}: {kind}, worst", max(seconds), bound, "s", len(seconds))


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=5, help="failures of each kind")
    arguments.add_argument("--lab-kernel", type=Path, help="for RDMA, see tests/rxe/build_kernel.sh")
    given = arguments.parse_args()
    rows = list(rows_of(run_on_ranks(measure, 2, given.rounds), "TCP", BOUND))
    if given.lab_kernel is not None:
        if (reason := lab.missing(given.lab_kernel)) is not None:
            sys.exit(f"bench/failover.py: {reason}")
        command = inside.command(_failing_rails.measure, given.rounds)
        finished = lab.run(given.lab_kernel, command, ROOT, timeout=120.0 + 120.0 * given.rounds)
        if finished.status != 0:
            sys.exit(finished.output)
        rows += rows_of(inside.result_of(finished.output), "RDMA", BOUND_OF_RAILS)
    print_rows("Time to the next path", rows, baseline="bound", as_json=given.json)


if __name__ == "__main__":
    main()
