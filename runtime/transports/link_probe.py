"""Latency and bandwidth of the links between the ranks of a group, measured when nothing else travels.

In every round each rank exchanges messages with one other. With n ranks, every pair has done so after n - 1 rounds. Round trips
need no common clock; a link is assumed to be the same in both directions.

What a message passes may hold it back until some of it is there. A second port does so by packets of up to 64 KiB. So where a
link is slow enough to show it, its latency is that of a message of some size, and not of one byte.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations, islice
from typing import Final

import torch
from torch.distributed import ProcessGroup

from adaptra.simulation.links import Link

ROUND_TRIPS: Final = 3
"""The number of round trips of each size; the fastest counts, since a busy host delays some."""

BULK_BYTES: Final = 1 << 18
"""The size of the larger of two messages that measure how long bytes occupy a link. The other one is half of it."""

PROBE_BYTES: Final = BULK_BYTES + ROUND_TRIPS * (BULK_BYTES // 2 + BULK_BYTES)
"""The bytes that a pair exchanges each way, but for those of single ones."""

_SHOWS_SECONDS: Final = 1e-3
"""The time of the bulk from which on the difference of two messages is more than what a busy host adds."""


def measure_links(group: ProcessGroup, rounds: int | None = None) -> dict[tuple[int, int], Link]:
    """Measure the links between ranks. All ranks of the group call it, and get the same.

    Args:
        group: A group that sends tensors of the CPU.
        rounds: After so many rounds no more pairs are measured. None: the links of all pairs.

    Raises:
        RuntimeError: A rank is lost.
    """
    ranks, rank = group.size(), group.rank()
    links = torch.zeros(ranks, ranks, 2, dtype=torch.float64)
    messages = [torch.zeros(size, dtype=torch.uint8) for size in (1, BULK_BYTES // 2, BULK_BYTES)]
    for peer in islice(partners(rank, ranks), rounds):
        if peer is None:
            continue
        if rank < peer:
            _to_and_fro(group, peer, messages[-1])  # a connection sends less at first
            one_way = (min(_to_and_fro(group, peer, message) for _ in range(ROUND_TRIPS)) / 2 for message in messages)
            link = link_of(*one_way)
            links[rank, peer] = torch.tensor([link.latency, link.per_byte])
        else:
            for message in (messages[-1], *(one for one in messages for _ in range(ROUND_TRIPS))):
                group.recv([message], peer, 0).wait()
                group.send([message], peer, 0).wait()
    group.allreduce([links]).wait()
    measured = [(one, other) for one, other in combinations(range(ranks), 2) if links[one, other, 0] > 0]
    return {(one, other): Link(*links[one, other].tolist()) for one, other in measured}


def link_of(least: float, half: float, whole: float) -> Link:
    """Return a link by what messages take on it: of one byte, of half of the bulk, and of all of it.

    A busy host may have delayed any of them. So a byte takes no more than if the latency were that of one byte, and no less
    than half of that.
    """
    most = max(0.0, whole - least) / BULK_BYTES
    per_byte = most if whole < _SHOWS_SECONDS else min(max(2 * (whole - half) / BULK_BYTES, most / 2), most)
    return Link(max(least, whole - per_byte * BULK_BYTES), per_byte)


def _to_and_fro(group: ProcessGroup, peer: int, message: torch.Tensor) -> float:
    started = time.monotonic()
    group.send([message], peer, 0).wait()
    group.recv([message], peer, 0).wait()
    return time.monotonic() - started


def partners(rank: int, ranks: int) -> Iterator[int | None]:
    """Yield the partner of a rank in each round, or None in a round in which it has none."""
    seats = ranks + ranks % 2
    for turn in range(seats - 1):
        # Round-robin tournament: the last seat is fixed, and other pairs add up to the turn modulo the seats.
        peer = (
            (turn - rank) % (seats - 1)
            if rank < seats - 1
            else next(seat for seat in range(seats - 1) if (2 * seat - turn) % (seats - 1) == 0)
        )
        peer = seats - 1 if peer == rank else peer
        yield peer if peer < ranks else None
