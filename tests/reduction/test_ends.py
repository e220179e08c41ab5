"""Ends of members that have their sums, while others still wait for theirs, and what is left of groups that have ended."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from processes import run_processes

pytestmark = pytest.mark.processes


def close_early(rank: int) -> list[float]:
    """Two sums, behind which one member closes while another still waits for a slow link: the second and the first of three.

    The first one has the store, and its process ends.
    """
    import torch.distributed as dist

    from adaptra import Reduce
    from adaptra.reduction.peers import Peers
    from adaptra.runtime.data_parallel.collectives.carriers import HostCarrier

    dist.init_process_group("gloo")
    carrier: Any = HostCarrier
    begin = carrier.begin
    sums: list[float] = []
    for how, slow in (Reduce(algorithm="chain"), (1, 0)), (Reduce(), (2, 1)):

        def begin_slowly(self: Any, messages: Any, slow: tuple[int, int] = slow) -> None:
            if any((one.source, one.destination) == slow for one, _ in messages):
                time.sleep(1.5)
            begin(self, messages)

        peers = Peers(None, how)
        carrier.begin = begin_slowly
        tensor = torch.ones(3000)
        peers.combine(tensor, "the sum", mean=False)
        carrier.begin = begin
        peers.close()
        sums.append(tensor.mean().item())
    return sums


def test_a_member_that_has_its_sum_may_end_before_others_have_theirs() -> None:
    assert run_processes(close_early, 3, store_stays=False) == [[3.0, 3.0]] * 3
