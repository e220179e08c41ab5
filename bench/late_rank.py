"""A sum over hosts with one limited port each, where ranks are late: seconds from their arrival until all have the result.

No port can take less than the bytes of the sum at its rate. Owners have all but the late terms before. With ``--narrow`` some
ports are slower, and their ranks own nothing either. The hosts need root, see ``tests/links/``. The smallest of ``--runs`` is
printed: other processes only add time.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from _ranks import run_on_hosts
from _table import Row, parser, print_rows

from adaptra.collectives.algorithms import LATE, algorithm_of
from adaptra.collectives.rounds import ALGORITHMS
from adaptra.runtime.data_parallel.collectives.engine import GroupSum


def measure(
    rank: int, algorithms: list[str], late: list[int], narrow: list[int], sizes: list[int], delay: float, runs: int
) -> list[float]:
    """The smallest seconds of each algorithm, and of gloo. Late and narrow ranks own nothing where an algorithm knows such."""
    group = dist.group.WORLD
    assert group is not None, "the ranks have joined"
    size, limit = sizes
    values = torch.randn(size // 4)
    without, in_time = tuple(sorted({*late, *narrow})), tuple(sorted({*narrow} - {*late}))
    ranks = without, in_time
    sums = [GroupSum(group, algorithm=algorithm_of(name, *(ranks if name in LATE else ())), limit=limit) for name in algorithms]
    works: list[Callable[[], object]] = [lambda one=one: one.combine([values], mean=False) for one in sums]
    works.append(lambda: dist.all_reduce(values, group=group))
    seconds = [math.inf] * len(works)
    for _ in range(runs + 1):
        for index, work in enumerate(works):
            values.fill_(rank)  # sums of sums would overflow
            dist.barrier()
            if rank in late:
                time.sleep(delay)
            moments = torch.tensor([time.monotonic() if rank in late or not late else 0.0, 0.0], dtype=torch.float64)
            work()
            moments[1] = time.monotonic()
            dist.all_reduce(moments, dist.ReduceOp.MAX, group)  # all hosts are of one machine, with one clock
            seconds[index] = min(seconds[index], float(moments[1] - moments[0]))
    return seconds


def narrow_port(text: str) -> tuple[int, float]:
    """Read a rank and the part of the rate that its port has, as ``3=0.5``."""
    rank, part = text.split("=")
    return int(rank), float(part)


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--late", type=int, nargs="*", default=[1], help="ranks that are late; none without a number")
    arguments.add_argument(
        "--narrow", type=narrow_port, nargs="*", default=[], metavar="RANK=PART", help="ports with a part of --rate"
    )
    arguments.add_argument("--megabytes", type=float, default=8.0, help="of the sum")
    arguments.add_argument("--buckets", type=int, default=16, help="the more, the less the last part's rounds weigh")
    arguments.add_argument("--rate", type=float, default=25.0, help="of each port each way, MB/s")
    arguments.add_argument("--algorithms", nargs="+", default=["direct", "streamed"], choices=[*ALGORITHMS, *LATE])
    arguments.add_argument("--runs", type=int, default=5)
    given = arguments.parse_args()
    size = int(given.megabytes * 1e6) // 4 * 4
    shortest = size / (given.rate * 1e6)
    parts = dict(given.narrow)
    ports = [f"{host} rate={given.rate * parts.get(host, 1.0):g}MB" for host in range(given.ranks)]
    how = given.algorithms, given.late, [*parts], [size, size // given.buckets], 2 * shortest, given.runs
    *ours, gloo = run_on_hosts(measure, given.ranks, ports, *how, steady=True)
    named = (", ".join(map(str, given.late)) or "nobody") + "".join(f", port {one} × {part:g}" for one, part in parts.items())
    rows = [
        Row(f"{name}, late: {named}", seconds, shortest, "s", given.runs)
        for name, seconds in [*zip(given.algorithms, ours, strict=True), ("gloo", gloo)]
    ]
    title = f"{given.ranks} hosts, {given.megabytes:g} MB, ports of {given.rate:g} MB/s"
    print_rows(title, rows, baseline="bytes ÷ rate", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
