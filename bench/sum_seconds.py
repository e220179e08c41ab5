"""What sums over replicas take over real links, beside what is predicted of links as they are measured.

Every rank is a host of its own (``tests/links``; needs root). For each table of links all pairs are measured, as
``pipe.settle_roles`` does. The seconds of a sum are computed from that, by the rounds that run. Then sums are timed.
"""

from __future__ import annotations

from statistics import median

import torch
import torch.distributed as dist
from _ranks import run_on_hosts, timed
from _table import Row, parser, print_rows

from adaptra.collectives.buckets import best_bucket_bytes
from adaptra.collectives.rounds import ALGORITHMS
from adaptra.collectives.seconds import SumPlan, slowest
from adaptra.runtime.data_parallel.collectives.engine import GroupSum
from adaptra.runtime.transports.link_probe import measure_links

TABLES: dict[str, tuple[int, float, tuple[str, ...]]] = {
    "2 ms everywhere": (4, 1.0, ("all delay=2ms",)),
    "one pair 20 ms": (4, 1.0, ("all delay=2ms", "0-1 delay=20ms")),
    "an opposite pair 20 ms": (4, 1.0, ("all delay=2ms", "0-2 delay=20ms")),
    "100 MB/s": (2, 16.0, ("all delay=200us rate=100MB",)),
    "20 MB/s": (2, 16.0, ("all delay=200us rate=20MB",)),
    "10 ms, 50 MB/s": (2, 16.0, ("all delay=10ms rate=50MB",)),
}
"""Replicas, megabytes of gradients, and the links. Each link has a rate of its own here, where real hosts have one for all of
theirs. So tables of more than two replicas differ in delays."""
BAR = 1.15


def measure(_rank: int, nbytes: int, algorithms: list[str], runs: int) -> list[tuple[float, float]]:
    """One rank: of each algorithm the predicted and the median measured seconds."""
    group = dist.group.WORLD
    assert group is not None, "the ranks have joined"
    ranks, values = group.size(), torch.ones(nbytes // 4)
    links = measure_links(group)
    limit = best_bucket_bytes(nbytes, ranks, slowest([*links.values()]))
    found: list[tuple[float, float]] = []
    for name in algorithms:
        predicted = SumPlan(name).seconds(nbytes, ranks, lambda one, other: links[one, other])
        one = GroupSum(group, algorithm=ALGORITHMS[name], limit=limit)
        took = [timed(lambda one=one: one.combine([values], mean=True))[0] for _ in range(runs + 2)]
        found.append((predicted, median(took[2:])))
    return found


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    arguments.add_argument("--runs", type=int, default=5, help="sums of each kind")
    given = arguments.parse_args()
    rows: list[Row] = []
    for table, (ranks, megabytes, links) in TABLES.items():
        found = run_on_hosts(measure, ranks, [*links], int(megabytes * 1e6), given.algorithms, given.runs, steady=True)
        for name, (predicted, measured) in zip(given.algorithms, found, strict=True):
            rows.append(Row(f"{ranks} replicas, {table}; {name}", 1e3 * predicted, 1e3 * measured, "ms", given.runs))
    print_rows("Seconds of sums over replicas, as predicted and as measured", rows, baseline="measured", as_json=given.json)
    return int(any(not 1 / BAR <= row.ours / (row.baseline or row.ours) <= BAR for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
