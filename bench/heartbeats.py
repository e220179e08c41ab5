"""Whether a healthy job outlives its own heartbeats where the control store is far away, and how soon a dead rank is named.

Every rank is a real membership with a connection of its own to a real torch TCPStore, through a proxy that delays whatever it
carries. Ranks are spread over a few processes. A case is ``RANKS:FAR:SECONDS``: the last FAR of RANKS ranks are SECONDS from
the store, each way. After the healthy time one rank stops beating, as on a frozen host, and all others must name it. No
direct questions are put, so that takes ``lost_after``, 10 s, at least.

    python bench/heartbeats.py --case 64:1:0.06 --case 256:256:0.15 --seconds 600
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from _table import Row, parser, print_rows

from adaptra.runtime.control_store.stores import Connection
from adaptra.runtime.membership.membership import Membership

CASES = tuple(f"{ranks}:{far}:{delay}" for ranks in (8, 64, 256) for delay in (0.0, 0.06, 0.15, 0.3) for far in (1, ranks))
STEP = 0.001
"""Seconds between two looks at a condition."""


@dataclass(frozen=True, slots=True)
class Case:
    """A number of ranks, how many of them are far from the store, and by how many seconds."""

    ranks: int
    far: int
    delay: float

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read it as the command line gives it."""
        ranks, far, delay = text.split(":")
        return cls(int(ranks), int(far), float(delay))

    def __str__(self) -> str:
        who = "all" if self.far == self.ranks else "one" if self.far == 1 else str(self.far)
        return f"{self.ranks} ranks, {who} {self.delay * 1000:g} ms away"


class Counted(Connection):
    """A connection that counts the questions that are answered, and its sets."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store)
        self.questions = 0
        self.told = 0

    def _request(self, make: Any) -> Any:
        self.questions += 1
        return super()._request(make)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Count it as a write, not as a question."""
        self.questions -= 1
        self.told += 1
        super().multi_set(keys, values)

    def set(self, key: str, value: str) -> None:
        """Count it as a write, not as a question."""
        self.questions -= 1
        self.told += 1
        super().set(key, value)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    loop = asyncio.get_running_loop()
    while data := await reader.read(1 << 16):
        loop.call_later(delay, writer.write, data)
    loop.call_later(delay, writer.close)


def _proxy(target: int, delay: float, ports: multiprocessing.Queue) -> None:
    """Carry connections to a port, each direction ``delay`` seconds late."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(_carry(reader, there[1], delay), _carry(there[0], writer, delay))

    async def serve() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0, backlog=1024)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


def _store(port: int, *, serves: bool = False) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=300))


def _run_ranks(ranks: list[int], case: Case, ports: dict[bool, int], told: Any, ends: Any, silent: int) -> None:
    """Some of the ranks, until ``ends`` is set; the silent one ends its beats once the event of that name is set."""
    stores = {rank: Counted(_store(ports[rank >= case.ranks - case.far])) for rank in ranks}
    told.put(("ready", ranks, None))
    ends["start"].wait()
    members = {
        rank: Membership(
            stores[rank], rank, case.ranks, lambda error, rank=rank: told.put(("lost", rank, (time.monotonic(), str(error))))
        )
        for rank in ranks
    }
    ends["kill"].wait()
    for rank, store in stores.items():
        told.put(("asked", rank, (store.questions, store.told, members[rank]._protocol.view._beat)))
    if silent in members:
        frozen: Any = _Frozen()
        stores[silent]._client = frozen
    ends["end"].wait()
    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(Membership.close, (member for rank, member in members.items() if rank != silent)))


class _Frozen:
    """What a frozen host hears of the store."""

    def __getattr__(self, name: str) -> None:
        time.sleep(3600)


def measure(case: Case, seconds: float, processes: int) -> list[Row]:
    """Run a case."""
    context = multiprocessing.get_context("spawn")
    found, told = context.Queue(), context.Queue()
    server = _store(0, serves=True)
    ends = {name: context.Event() for name in ("start", "kill", "end")}
    proxy = context.Process(target=_proxy, args=(server.port, case.delay, found), daemon=True)
    proxy.start()
    ports = {True: found.get(), False: server.port}
    silent = case.ranks - 1
    groups = [list(range(case.ranks))[first::processes] for first in range(min(processes, case.ranks))]
    started = [
        context.Process(target=_run_ranks, args=(group, case, ports, told, ends, silent), daemon=True) for group in groups
    ]
    for one in started:
        one.start()
    for _ in started:
        told.get()
    ends["start"].set()
    lost = _losses(told, seconds, 1)
    healthy = not lost
    for _, rank, (_, text) in lost:
        print(f"{case}: rank {rank} was told: {text}", flush=True)
    killed_at = time.monotonic()
    ends["kill"].set()
    asked = [told.get() for _ in range(case.ranks)] if healthy else []
    named = _losses(told, 60, case.ranks - 1, silent) if healthy else []
    ends["end"].set()
    for one in (*started, proxy):
        one.join(1 if one is proxy else 20)
        one.kill()
    rows = [Row(f"{case}: lost while healthy for {seconds:g} s", len(lost), None, "ranks", 1)]
    if healthy:
        beats = [(questions / beat, tells / beat) for _, _, (questions, tells, beat) in asked]
        rows.append(
            Row(f"{case}: answered requests per beat and rank, most", max(one for one, _ in beats), None, "requests", 1)
        )
        rows.append(
            Row(f"{case}: unanswered messages per beat and rank, most", max(one for _, one in beats), None, "messages", 1)
        )
        right = [at for _, _, (at, text) in named if f"rank {silent} " in text]
        if len(right) == case.ranks - 1:
            rows.append(Row(f"{case}: until a frozen rank is named to all", max(right) - killed_at, None, "s", 1))
        else:
            rows.append(
                Row(f"{case}: ranks that were not told of the frozen one", case.ranks - 1 - len(right), None, "ranks", 1)
            )
    return rows


def _losses(told: Any, seconds: float, most: int, but: int | None = None) -> list[tuple]:
    """What ranks learned of a loss within a time, until ``most`` did; all ``but`` one."""
    deadline, found = time.monotonic() + seconds, []
    while len(found) < most and time.monotonic() < deadline:
        if not told.empty():
            what = told.get()
            if what[0] == "lost" and what[1] != but:
                found.append(what)
        time.sleep(0 if not told.empty() else 10 * STEP)
    return found


def main() -> None:
    """Measure what the arguments say."""
    made = parser(__doc__ or "")
    made.add_argument("--case", action="append", metavar="RANKS:FAR:DELAY", help="default: 8, 64, 256 ranks at 0 to 0.3 s")
    made.add_argument("--seconds", type=float, default=60.0, help="how long a job is healthy")
    made.add_argument("--processes", type=int, default=8, help="how many processes share the ranks")
    arguments = made.parse_args()
    rows = []
    for text in arguments.case or CASES:
        measured = measure(Case.parse(text), arguments.seconds, arguments.processes)
        rows += measured
        if not arguments.json:
            for row in measured:
                print(json.dumps(row.to_json()), flush=True)
    print_rows("Heartbeats", rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
