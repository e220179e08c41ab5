"""Ranks that add in different ways get an error that names both, and no sum."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from errors_table import check_documented
from processes import run_processes

from adaptra import Reduce

pytestmark = pytest.mark.processes

OTHER = "rank … does: …; rank …: …: expected the same on all ranks of the group"
# Messages of the first two have the same sizes in both ways.
WAYS: list[tuple[Reduce | None, Reduce | None]] = [
    (Reduce(algorithm="chain"), None),
    (Reduce(dtype=torch.float32), None),
    (Reduce(bucket=4000), Reduce(bucket=2000)),
]


def differ(rank: int) -> tuple[list[tuple[str, str]], list[float]]:
    """The errors of buckets that two ranks add in different ways, and sums of two that say the same in two ways."""
    import torch.distributed as dist

    from adaptra import reduction

    dist.init_process_group("gloo")
    errors: list[tuple[str, str]] = []
    for ways in WAYS:
        group: Any = dist.new_group([0, 1])
        with reduction.HookState(group, ways[rank]) as state:
            with suppress(Exception):
                state.begin(0, torch.full((1000,), 1.0 + rank, dtype=torch.bfloat16)).wait()
            errors.append((type(state.error).__name__, str(state.error)))
        dist.barrier()
    same = torch.full((2,), 1.0 + rank)
    reduction.all_reduce(same, how=Reduce() if rank else None)
    dist.destroy_process_group()
    return errors, same.tolist()


def test_ranks_that_add_in_different_ways_are_named() -> None:
    for rank, (errors, same) in enumerate(run_processes(differ, 2)):
        assert same == [3.0, 3.0]
        for ways, (kind, text) in zip(WAYS, errors, strict=True):
            check_documented(kind, text, OTHER)
            own, other = ways[rank] or Reduce(), ways[1 - rank] or Reduce()
            what = "the mean of bucket 0 of gradients, bfloat16[1000] by"
            assert f"rank {rank} does: {what} {own}; rank {1 - rank}: {what} {other}:" in text
