"""A process whose Python does not run for a while stays in the job, and one that is frozen ends it soon."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

import pytest
from processes import run_processes

BUSY_SECONDS = 5
"""Longer than a frozen process stays in the job."""


def train_beside_busy_and_frozen(rank: int) -> tuple[list[str], int | None, str] | None:
    """What differs from one process though two ranks are busy for a while; then the lost rank, once rank 0 is frozen.

    Rank 0 reads all heartbeats and has the store.
    """
    import torch.distributed as dist
    from training import MIXED, adam, compiled, differences, run_step, train_alone

    from adaptra.errors import PeerLostError

    dist.init_process_group("gloo")
    batches = [MIXED.rows(12, seed) for seed in range(4)]
    expected = train_alone(MIXED, batches[:3], 4)
    with compiled(MIXED, batches[0], stages=3, microbatches=4) as pipe:
        optimizer = adam(pipe.parameters())
        steps = []
        for index, batch in enumerate(batches[:3]):
            if rank == {1: 1, 2: 0}.get(index):
                ctypes.PyDLL(None).usleep(BUSY_SECONDS * 1_000_000)  # holds the interpreter's lock
            steps.append(run_step(pipe, optimizer, batch))
        found = differences(steps, expected, whole=False)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(PeerLostError) as caught:
            while True:
                run_step(pipe, optimizer, batches[3])
        return found, caught.value.rank, str(caught.value)


@pytest.mark.processes
def test_a_busy_process_is_no_loss_and_a_frozen_one_is_named_soon() -> None:
    told: list[Any] = run_processes(train_beside_busy_and_frozen, 3, may_die=(0,))
    for rank in (1, 2):
        found, lost, text = told[rank]
        assert found == [], "the numbers are those of one process"
        assert lost == 0 and "the control store is lost" in text
        seconds = float(text.partition("no answer for ")[2].split()[0])
        assert 2.0 < seconds < 6.0, text
