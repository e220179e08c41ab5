"""The delegate's engine over TCP beside gloo's send and recv: time per message, latency of one message, processor time per GiB.

    bench/delegate.py                                           on this machine's loopback
    bench/delegate.py --delay 0 10ms 30ms --rate 0 100MB        between two hosts, over links of each delay and rate (root)

Two ranks in one run take turns on the same link. Messages go from rank 0 to rank 1 with several outstanding. Nothing is
copied beyond what each transport does itself, and the engine also sums every byte on both sides. ``--rounds`` pairs are
measured, and the medians are printed. The baseline is gloo.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from statistics import median

import torch
import torch.distributed as dist
from _exchanges import Delegate, Gloo, make_engine
from _ranks import run_on_hosts, run_on_ranks
from _table import Row, parser, print_rows

from adaptra import _C

MIB = 1 << 20
SMALL = 4096


def timed(work: Callable[[int], object], count: int) -> tuple[float, float]:
    """Wall-clock seconds until both ranks are done, and the processor time of both."""
    dist.barrier()
    started, worked = time.perf_counter(), time.process_time()
    work(count)
    spent = torch.tensor([time.perf_counter() - started, time.process_time() - worked], dtype=torch.float64)
    longest = spent.clone()
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    dist.all_reduce(spent)
    return float(longest[0]), float(spent[1])


def measure_latency(engine: _C.Engine, rank: int, link: str, rounds: int, echoes: int) -> Row:
    """One small message at a time."""
    ours, gloo = Delegate(engine, rank, SMALL, 1), Gloo(rank, SMALL, 1)
    found = [(timed(ours.echo, echoes)[0], timed(gloo.echo, echoes)[0]) for _ in range(rounds + 1)][1:]
    mine, theirs = (median(pair[side] for pair in found) / (2 * echoes) * 1e6 for side in (0, 1))
    return Row(f"{link}: latency of 4 KiB", mine, theirs, "µs", rounds)


def measure_messages(
    engine: _C.Engine, rank: int, link: str, size: int, outstanding: int, volume: int, rounds: int
) -> list[Row]:
    """Many messages of one size."""
    count = max(2 * outstanding, volume // size)
    ours, gloo = Delegate(engine, rank, size, outstanding), Gloo(rank, size, outstanding)
    # Windows, connections and the pages of buffers are those of a program that has run for a while.
    ours.exchange(count)
    gloo.exchange(count)
    pairs = [(timed(ours.exchange, count), timed(gloo.exchange, count)) for _ in range(rounds)]
    name = f"{link}: {size // MIB} MiB, {outstanding} outstanding"
    gib = count * size / 2**30
    took, theirs = (median(pair[side][0] for pair in pairs) / count * 1e3 for side in (0, 1))
    worked, they_worked = (median(pair[side][1] for pair in pairs) / gib for side in (0, 1))
    return [
        Row(name, took, theirs, "ms/message", rounds),
        Row(name, worked, they_worked, "processor s/GiB", rounds),
    ]


def measure(
    rank: int, link: str, sizes: list[int], outstanding: int, volume: int, rounds: int, echoes: int
) -> list[dict[str, object]]:
    """One rank: rows as JSON. ``link`` is what to call the link between the two."""
    engine = make_engine(rank, 1)
    rows = [measure_latency(engine, rank, link, rounds, echoes)]
    for size in sizes:
        rows += measure_messages(engine, rank, link, size, outstanding, volume, rounds)
    connections = max(counters["connections"] for *_, counters in engine.statistics())
    rows.append(Row(f"{link}: connections used at the end", connections, 1, "", 1))
    engine.close("measured", 1.0)
    return [row.to_json() for row in rows]


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--delay", nargs="+", help="one way, of links between two hosts, such as 30ms")
    arguments.add_argument("--rate", nargs="+", help="bytes per second, such as 100MB; 0 for no limit")
    arguments.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64], help="of the messages, in MiB")
    arguments.add_argument("--outstanding", type=int, default=8, help="messages under way at a time")
    arguments.add_argument("--volume", type=int, default=1024, help="MiB per measurement")
    arguments.add_argument("--rounds", type=int, default=5, help="pairs of measurements")
    arguments.add_argument("--echoes", type=int, default=100, help="small messages to and fro per measurement")
    given = arguments.parse_args()
    details = ([size * MIB for size in given.sizes], given.outstanding, given.volume * MIB, given.rounds, given.echoes)
    if given.delay is None and given.rate is None:
        found = run_on_ranks(measure, 2, "loopback", *details)
    else:
        # Hosts of their own for each link: connections remember the link that they were made over.
        found = []
        for delay, rate in product(given.delay or ["0"], given.rate or ["0"]):
            name = f"{delay}, {'any rate' if rate == '0' else f'{rate}/s'}"
            found += run_on_hosts(measure, 2, [f"all delay={delay} rate={rate}"], name, *details)
    rows = [Row(row["name"], row["ours"], row["baseline"], row["unit"], row["runs"]) for row in found]
    print_rows("The delegate over TCP beside gloo", rows, baseline="gloo", as_json=given.json)


if __name__ == "__main__":
    main()
