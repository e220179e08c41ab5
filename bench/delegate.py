"""The delegate's engine over TCP beside gloo's send and recv: time per message, latency of one message, processor time per GiB.

Two ranks in one run, which take turns on the same link: without a launcher on this machine's loopback, under one that sets
RANK and WORLD_SIZE=2 between two hosts. Messages go from rank 0 to rank 1 with several outstanding; nothing is copied beyond
what each transport does itself, and the engine also sums every byte on both sides. ``--rounds`` pairs are measured, the medians
are printed. The baseline is gloo.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from _ranks import run_on_ranks
from _table import Row, parser, print_rows
from torch import Tensor

from adaptra import _C
from adaptra.runtime.transports.endpoints import Endpoint, address_towards, share_endpoints, share_secret
from adaptra.runtime.transports.groups import new_group

MIB = 1 << 20
PATIENCE = 120.0


class Gloo:
    """Messages by torch.distributed's isend and irecv."""

    def __init__(self, rank: int, size: int, outstanding: int) -> None:
        self._peer = 1 - rank
        self._buffers = [torch.ones(size, dtype=torch.uint8) for _ in range(outstanding)]
        self._is_source = rank == 0

    def exchange(self, count: int) -> None:
        """Move ``count`` messages from rank 0 to rank 1."""
        start: Callable[[Tensor, int], dist.Work | None] = dist.isend if self._is_source else dist.irecv
        works: deque[dist.Work] = deque()
        for k in range(count):
            if len(works) == len(self._buffers):
                works.popleft().wait()
            work = start(self._buffers[k % len(self._buffers)], self._peer)
            assert work is not None
            works.append(work)
        for work in works:
            work.wait()

    def echo(self, count: int) -> None:
        """Send a message to and fro ``count`` times."""
        for _ in range(count):
            for source in (0, 1):
                (dist.send if self._is_source == (source == 0) else dist.recv)(self._buffers[0], self._peer)


class Delegate:
    """Messages by the engine."""

    def __init__(self, engine: _C.Engine, rank: int, size: int, outstanding: int) -> None:
        self._engine = engine
        self._peer = 1 - rank
        self._size = size
        self._buffers = [engine.allocate(size) for _ in range(outstanding)]
        self._is_source = rank == 0
        engine.reserve(self._peer, size, outstanding)

    def exchange(self, count: int) -> None:
        """Move ``count`` messages from rank 0 to rank 1."""
        requests: deque[_C.Request] = deque()
        for k in range(count):
            if len(requests) == len(self._buffers):
                self._end(requests.popleft())
            requests.append(self._begin(self._is_source, k))
        for request in requests:
            self._end(request)

    def echo(self, count: int) -> None:
        """Send a message to and fro ``count`` times."""
        for _ in range(count):
            for source in (0, 1):
                is_source = self._is_source == (source == 0)
                request = self._begin(is_source, 0)
                if not is_source:
                    self._end(request)

    def _begin(self, is_source: bool, k: int) -> _C.Request:
        # Rank 0's messages take the forward channel, rank 1's the backward one.
        if not is_source:
            return self._engine.receive(self._peer, self._is_source, self._size)
        message = self._buffers[k % len(self._buffers)]
        return self._engine.send(self._peer, not self._is_source, message, self._size, time.monotonic())

    def _end(self, request: _C.Request) -> None:
        assert request.wait(PATIENCE) and request.error is None, request.error
        self._engine.release(request)


def make_engine(rank: int, paths: int) -> _C.Engine:
    """The engine of one of two ranks, with the same address as often as paths are wanted."""
    store = new_group([0, 1], "gloo").get_group_store()
    host = address_towards(store)
    engine = _C.Engine(
        rank, 2, share_secret(store, rank), heartbeat=0.2, silence=5.0, healthy_for=1.0, lost_after=30.0, handshake=5.0
    )
    mine = [Endpoint("tcp", host, engine.add_tcp_path(host)) for _ in range(paths)]
    theirs = share_endpoints(store, rank, 2, mine)[1 - rank]
    engine.set_peer(1 - rank, [(endpoint.host, endpoint.port) for endpoint in theirs])
    engine.start()
    return engine


def timed(work: Callable[[int], None], count: int) -> tuple[float, float]:
    """Wall-clock seconds until both ranks are done, and the processor time of both."""
    dist.barrier()
    started, worked = time.perf_counter(), time.process_time()
    work(count)
    spent = torch.tensor([time.perf_counter() - started, time.process_time() - worked], dtype=torch.float64)
    longest = spent.clone()
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    dist.all_reduce(spent)
    return float(longest[0]), float(spent[1])


def measure(rank: int, sizes: list[int], outstanding: int, volume: int, rounds: int) -> list[dict[str, object]]:
    """One rank: rows as JSON."""
    engine = make_engine(rank, 1)
    rows: list[Row] = []
    small = 4096
    ours, gloo = Delegate(engine, rank, small, 1), Gloo(rank, small, 1)
    found = [(timed(ours.echo, 100)[0], timed(gloo.echo, 100)[0]) for _ in range(rounds + 1)][1:]
    rows.append(
        Row("latency of 4 KiB", *(median(pair[side] for pair in found) / 200 * 1e6 for side in (0, 1)), "µs", len(found))
    )
    for size in sizes:
        count = max(2 * outstanding, volume // size)
        ours, gloo = Delegate(engine, rank, size, outstanding), Gloo(rank, size, outstanding)
        ours.exchange(count)
        gloo.exchange(outstanding)
        pairs = [(timed(ours.exchange, count), timed(gloo.exchange, count)) for _ in range(rounds)]
        name = f"{size // MIB} MiB, {outstanding} outstanding"
        rows.append(
            Row(name, *(median(pair[side][0] for pair in pairs) / count * 1e3 for side in (0, 1)), "ms/message", rounds)
        )
        gib = count * size / 2**30
        rows.append(Row(name, *(median(pair[side][1] for pair in pairs) / gib for side in (0, 1)), "processor s/GiB", rounds))
    connections = max(counters["connections"] for *_, counters in engine.statistics())
    rows.append(Row("connections used at the end", connections, 1, "", 1))
    engine.close("measured", 1.0)
    return [row.to_json() for row in rows]


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64], help="of the messages, in MiB")
    arguments.add_argument("--outstanding", type=int, default=8, help="messages under way at a time")
    arguments.add_argument("--volume", type=int, default=1024, help="MiB per measurement")
    arguments.add_argument("--rounds", type=int, default=5, help="pairs of measurements")
    given = arguments.parse_args()
    details = ([size * MIB for size in given.sizes], given.outstanding, given.volume * MIB, given.rounds)
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = measure(dist.get_rank(), *details)
        is_printed = dist.get_rank() == 0
        dist.barrier()
        dist.destroy_process_group()
        if not is_printed:
            return
    else:
        found = run_on_ranks(measure, 2, *details)
    rows = [Row(row["name"], row["ours"], row["baseline"], row["unit"], row["runs"]) for row in found]
    print_rows("The delegate over TCP beside gloo", rows, baseline="gloo", as_json=given.json)


if __name__ == "__main__":
    main()
