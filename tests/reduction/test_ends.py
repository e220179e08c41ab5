"""Ends of members that have their sums, while others still wait for theirs, and what is left of groups that have ended."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import HUNG
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


GROUPS = 8
MOST_LEFT = {"threads": 3, "task": 6, "fd": 4 * GROUPS}
"""What may come with the first group, and descriptors of torch's own groups until they are collected. Each group has more."""


def use_groups(_: int) -> dict[str, int]:
    """How many more threads of Python and of the system, and descriptors, there are behind some groups than before them."""
    import torch.distributed as dist

    from adaptra import reduction

    dist.init_process_group("gloo")

    def counts() -> dict[str, int]:
        of_system = {kind: len([*Path(f"/proc/self/{kind}").iterdir()]) for kind in ("task", "fd")}
        return {"threads": threading.active_count(), **of_system}

    before = counts()
    for _number in range(GROUPS):
        group: Any = dist.new_group([0, 1])
        reduction.all_reduce(torch.ones(3), group)
        dist.destroy_process_group(group)
        del group
    until = time.monotonic() + 60
    while True:
        gc.collect()
        more = {kind: count - before[kind] for kind, count in counts().items()}
        if all(more[kind] <= MOST_LEFT[kind] for kind in more) or time.monotonic() > until:
            return more
        threading.Event().wait(0.2)


def test_a_group_that_is_destroyed_leaves_no_threads_and_connections() -> None:
    for more in run_processes(use_groups, 2):
        assert all(more[kind] <= most for kind, most in MOST_LEFT.items()), more


def end_waits_under_a_default_device(rank: int) -> bool:
    """Whether a wait for a message ends, where new tensors have no memory by default."""
    import torch.distributed as dist

    from adaptra.runtime.transports.process_groups import FOR_EVER, Members, end_waits, new_group

    dist.init_process_group("gloo")
    group = new_group(Members("waits", rank, 2), "gloo", FOR_EVER)
    has_ended = threading.Event()

    def wait() -> None:
        try:
            group.recv([torch.empty(3)], 1, 5).wait()
        except RuntimeError:
            has_ended.set()

    if rank == 0:
        threading.Thread(target=wait, daemon=True).start()
        with torch.device("meta"):
            end_waits(group)
    has_ended.wait(HUNG if rank == 0 else 0)
    dist.barrier()
    return has_ended.is_set()


def test_waits_end_whatever_the_default_device_is() -> None:
    assert run_processes(end_waits_under_a_default_device, 2)[0]
