"""A process that dies while replicas sum is named by all, and not the living ones whose connections end because of it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from processes import run_processes

pytestmark = pytest.mark.processes


def train_until_a_sum_breaks(rank: int, victim: int, transport: str, stages: int) -> tuple[int | None, str] | None:
    """The rank that is named, and the text, once the victim has died as its sum of the second step begins."""
    import torch.distributed as dist
    from training import MIXED, compiled

    from adaptra.errors import PeerLostError
    from adaptra.runtime.data_parallel.collectives.engine import GroupSum

    dist.init_process_group("gloo")
    inputs, _, targets = batch = MIXED.rows(12, seed=0)
    with compiled(MIXED, batch, stages=stages, microbatches=4, transport=transport) as pipe:
        pipe.step(inputs[0], targets)
        if rank == victim:
            GroupSum._move = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        with pytest.raises(PeerLostError) as lost:
            while True:  # some may complete the step in which it dies
                pipe.step(inputs[0], targets)
        return lost.value.rank, str(lost.value)


@pytest.mark.parametrize(
    ("processes", "stages", "transport", "victim"),
    [(3, 1, "c10d", 1), (4, 2, "c10d", 2), (4, 2, "delegate", 3)],
    ids=["three replicas", "two pipelines over gloo", "two pipelines over the delegate"],
)
def test_a_process_that_dies_in_a_sum_is_named_by_all(processes: int, stages: int, transport: str, victim: int) -> None:
    told: list[Any] = run_processes(train_until_a_sum_breaks, processes, victim, transport, stages, may_die=(victim,))
    for rank in {*range(processes)} - {victim}:
        named, text = told[rank]
        assert named == victim and f"rank {victim} " in text, text
