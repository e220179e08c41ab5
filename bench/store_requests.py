"""What the control plane asks of its store, counted rank by rank, up to 1,000 ranks in one process.

The store is in memory and counts requests, and the bytes of their keys and values. Prefixes of keys, signatures and frames come
on top. Heartbeats are stepped one rank after the other on a clock of the bench's, half a second each, with no thread. Nothing
here depends on the machine's speed. At the start each rank is a thread that compares its arguments with all others'.

    python bench/store_requests.py --ranks 64 --ranks 256 --ranks 1000

Beside the comparison at the start stands one in which each rank reads the texts of all. At rest the bar is 4 requests per rank
and second. Then one rank fails, and the heartbeats go on until each rank names it. Then
all ranks leave because of it. That is counted up to 256 ranks, because each lists all that left: bytes grow with their square.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _table import Row, parser, print_rows

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests" / "support")]
from counting_store import CountingStore
from stepped_ranks import SteppedRanks

from adaptra.errors import TransportError
from adaptra.runtime.exchange.store_exchange import exchange
from adaptra.runtime.launch.arguments import agree_on_arguments
from adaptra.runtime.membership.cause import failure_of
from adaptra.runtime.membership.view import Phase

RANKS = (64, 256, 1000)
AT_REST = 4.0
"""The bar: requests per rank and second while all is well."""
_BEATS = 40
_SECONDS = 300.0
ARGUMENTS = {f"argument {number}": "a value of the user's" for number in range(23)}
"""As many as compile compares, about as long."""
_LEAVING_AT_MOST = 256


def at_start(count: int) -> Iterator[Row]:
    """Requests and bytes of the rank that makes most of them, until all have compared their arguments."""
    counted: list[CountingStore] = []
    for compare in (_up_a_tree, _each_with_each):
        store = CountingStore()
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(lambda rank, compare=compare, store=store: compare(store.of(rank), rank, count), range(count)))
        counted.append(store)
    ours, theirs = counted
    what = f"{count} ranks compare arguments"
    yield Row(f"{what}: requests, most", ours.most_requests(), theirs.most_requests(), "1/rank", 1)
    yield Row(f"{what}: bytes, most", max(ours.bytes.values()), max(theirs.bytes.values()), "B/rank", 1)


def _up_a_tree(store: Any, rank: int, count: int) -> None:
    agree_on_arguments(store, rank, count, ARGUMENTS, _SECONDS)


def _each_with_each(store: Any, rank: int, count: int) -> None:
    own = json.dumps({"arguments": ARGUMENTS, "nonce": ""})
    exchange(store, "arguments", rank, own, range(count), _SECONDS)


def at_rest(job: SteppedRanks) -> Iterator[Row]:
    """Requests and bytes of healthy ranks, once all have joined."""
    count = len(job.ranks)
    for _ in range(3):
        job.beat()
    job.store.forget()
    began = job.now
    for _ in range(_BEATS):
        job.beat()
    seconds, used = job.now - began, job.store.bytes
    yield Row(f"{count} ranks at rest: requests, most", job.store.most_requests() / seconds, AT_REST, "1/rank/s", 1)
    yield Row(f"{count} ranks at rest: the leader", used[0] / seconds, None, "B/s", 1)
    yield Row(f"{count} ranks at rest: each other rank", max(used[one] for one in range(1, count)) / seconds, None, "B/s", 1)


def failing(job: SteppedRanks) -> Iterator[Row]:
    """Requests and bytes until all ranks name the rank that failed."""
    count = len(job.ranks)
    error = ValueError("a failure")
    job.ranks[count // 2].fail(failure_of(error, None, None), error)
    job.store.forget()
    order = random.Random(0).sample(range(count), count)
    beats = 0
    while len(job.told) < count - 1:
        job.beat(order)
        beats += 1
    yield Row(f"{count} ranks, until all name a failure: heartbeats", beats, None, "beats", 1)
    yield from _counted(job, f"{count} ranks, until all name a failure")


def leaving(job: SteppedRanks) -> Iterator[Row]:
    """Requests and bytes from then on until all ranks have left."""
    count = len(job.ranks)
    for rank in job.told:
        error = TransportError("connection closed")
        job.ranks[rank].fail(failure_of(error, None, None), error)
    job.store.forget()
    while any(one.view.phase is not Phase.KNOWN for one in job.ranks):
        job.beat()
    yield from _counted(job, f"{count} ranks, until all have left then")


def _counted(job: SteppedRanks, what: str) -> Iterator[Row]:
    yield Row(f"{what}: requests, most", job.store.most_requests(), None, "1/rank", 1)
    yield Row(f"{what}: bytes, most", max(job.store.bytes.values()), None, "B/rank", 1)


def main() -> None:
    """Count what the arguments say."""
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, action="append", help="default: 64, 256 and 1,000")
    given = made.parse_args()
    rows: list[Row] = []
    for count in given.ranks or RANKS:
        job = SteppedRanks(count)
        rows += [*at_start(count), *at_rest(job), *failing(job)]
        if count <= _LEAVING_AT_MOST:
            rows += leaving(job)
    print_rows("Requests to the control store", rows, baseline="bar, or all read all", as_json=given.json)


if __name__ == "__main__":
    main()
