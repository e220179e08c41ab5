"""Latency and bandwidth of the links between the ranks of a group, measured when nothing else travels.

In every round each rank exchanges messages with one other. With n ranks, every pair has done so after n - 1 rounds. Round trips
need no common clock; a link is assumed to be the same in both directions.
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
"""The size of the message that measures how long bytes occupy a link."""


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
    for peer in islice(partners(rank, ranks), rounds):
        small, bulk = torch.zeros(1, dtype=torch.uint8), torch.zeros(BULK_BYTES, dtype=torch.uint8)
        if peer is None:
            continue
        if rank < peer:
            latency, whole = (
                min(_to_and_fro(group, peer, message) for _ in range(ROUND_TRIPS)) / 2 for message in (small, bulk)
            )
            links[rank, peer] = torch.tensor([latency, max(0.0, whole - latency) / BULK_BYTES])
        else:
            for message in (*(small,) * ROUND_TRIPS, *(bulk,) * ROUND_TRIPS):
                group.recv([message], peer, 0).wait()
                group.send([message], peer, 0).wait()
    group.allreduce([links]).wait()
    measured = [(one, other) for one, other in combinations(range(ranks), 2) if links[one, other, 0] > 0]
    return {(one, other): Link(*links[one, other].tolist()) for one, other in measured}


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
