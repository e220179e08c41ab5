"""The first call of a group, to which its ranks come late, in another order, or not at all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from errors_table import check_documented
from processes import run_processes

pytestmark = pytest.mark.processes

OTHER = "rank … does: …; rank …: …: expected the same on all ranks of the group"
LATE = "rank … has not come to … within … s, the timeout of the process group: expected it on all ranks of the group"
LOST = "rank … is lost…"

Errors = list[tuple[str, str, int | None]]


def first_calls(rank: int) -> tuple[list[float], Errors]:
    """The sums of two threads that join two groups in other orders, and the errors of first calls that can't end."""
    import torch.distributed as dist

    from adaptra import reduction
    from adaptra.errors import AdaptraError
    from adaptra.reduction import joining

    internals: Any = joining
    dist.init_process_group("gloo")
    g, h, of_hook, one, other, late = [dist.new_group(ranks) for ranks in [[0, 1]] * 5 + [[0, 2]]]
    groups: Any = g, h, of_hook, one, other, late
    g, h, of_hook, one, other, late = groups
    sums, errors = [0.0, 0.0], list[tuple[str, str, int | None]]()

    def add(number: int) -> None:
        tensor = torch.ones(3)
        reduction.all_reduce(tensor, (g, h)[number])
        sums[number] = tensor.sum().item()

    def refused(call: Callable[[], Any]) -> None:
        try:
            call()
        except AdaptraError as error:
            errors.append((type(error).__name__, str(error), getattr(error, "rank", None)))

    if rank < 2:
        threads = [threading.Thread(target=add, args=(number,)) for number in ((0, 1) if rank == 0 else (1, 0))]
        for thread in threads:
            thread.start()
            time.sleep(0.2)  # so that the ranks begin in other orders, as far as they can
        for thread in threads:
            thread.join()
        internals._CROSSED_SECONDS = 1.0
        calls = [lambda: reduction.HookState(of_hook), lambda: reduction.all_reduce(torch.ones(3), of_hook)]
        for call in calls if rank == 0 else calls[::-1]:
            refused(call)
        for _ in range(2):
            refused(lambda: reduction.all_reduce(torch.ones(3), one if rank == 0 else other))
    if rank == 0:
        store = internals.job_store()
        timeout = store.timeout
        store.set_timeout(timedelta(seconds=1))
        refused(lambda: reduction.all_reduce(torch.ones(3), late))
        store.set_timeout(timeout)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        refused(lambda: reduction.all_reduce(torch.ones(3)))
    return sums, errors


def test_first_calls_that_can_not_end_are_errors_that_name_the_ranks() -> None:
    told = run_processes(first_calls, 3, may_die=(2,))
    for rank, (sums, errors) in enumerate(told[:2]):
        assert sums == [6.0, 6.0]
        rows = [OTHER, OTHER, OTHER, OTHER, *[LATE][rank:], LOST, LOST]
        assert len(errors) == len(rows), errors
        for (kind, text, named), row in zip(errors, rows, strict=True):
            check_documented(kind, text, row)
            assert named == (None if row == OTHER else 2)
        for _, text, _ in errors[:4]:
            assert "rank 0" in text and "rank 1" in text
        # Each rank may find it by itself, and then names itself first.
        assert all("the first HookState" in text and "the first call of a function" in text for _, text, _ in errors[:2])
