"""A checkpoint that can't be saved costs that checkpoint: no rank waits for ever, and training goes on, with the same numbers.

The store is in the test's own process, so that nobody tells the end of the rank that dies.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from test_hosting import digest
from test_survival import join_by, run_with_store

pytestmark = pytest.mark.processes

STEPS = 5
FULL, LOST, GROUP = 1, 2, 3
"""The steps after which a disk is full, in whose checkpoint a rank dies, and while the group for whose checkpoint is made."""


def save_often(rank: int, port: int, folder: Path) -> list[tuple[list[str], str]]:
    """What each save of an undisturbed and of a disturbed training said, with a digest of its losses."""
    import torch.distributed as dist

    join_by(port)
    dist.init_process_group("gloo")
    return [saved_often(rank, folder / str(disturbed), disturbed=disturbed) for disturbed in (False, True)]


def saved_often(rank: int, folder: Path, *, disturbed: bool) -> tuple[list[str], str]:
    import torch
    import torch.distributed.checkpoint as dcp
    from training import MIXED, adam, compiled

    import adaptra
    from adaptra.runtime.launch import job

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    class Dying(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            die()

    inputs, _, targets = batch = MIXED.rows(12, seed=0)
    said: list[str] = []
    losses: list[torch.Tensor] = []
    with compiled(MIXED, batch, stages=2, microbatches=4, options=adaptra.Options(survive=True)) as pipe:
        optimizer = adam(pipe.parameters())
        state = {"training": adaptra.TrainingState(pipe, optimizer)}
        for step in range(STEPS):
            losses.append(pipe.step(inputs[0], targets))
            optimizer.step()
            optimizer.zero_grad()
            path = folder / f"step-{step}"
            if disturbed and step == FULL and rank == 1:
                path.mkdir(parents=True, exist_ok=True)
                (path / "__1_0.distcp").symlink_to("/dev/full")
            if disturbed and step == GROUP and rank == 0:
                job.new_group_of_user = die
            writer = Dying(path) if disturbed and step == LOST and rank == 3 else dcp.FileSystemWriter(path)
            try:
                dcp.save(state, storage_writer=writer, process_group=pipe.group)
            except (dcp.CheckpointException, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
            else:
                said.append("saved")
        # The first group is left behind; what is saved last is read by the processes that are left.
        dcp.load(state, checkpoint_id=folder / f"step-{STEPS - 1}", process_group=pipe.group)
        losses.append(pipe.step(inputs[0], targets))
    return said, digest(torch.stack(losses))


def test_training_goes_on_where_a_disk_is_full_and_ranks_die_in_saves(tmp_path: Path) -> None:
    first, *told, last = run_with_store(save_often, 4, tmp_path, may_die=(0, 3))
    assert first is None and last is None
    assert len({numbers for trainings in told for _, numbers in trainings}) == 1
    for (undisturbed, _), (said, _) in told:
        assert undisturbed == ["saved"] * STEPS
        assert [text == "saved" for text in said] == [step not in (FULL, LOST, GROUP) for step in range(STEPS)]
        assert "(RANK 1)" in said[FULL] and "No space left on device" in said[FULL]
        assert (
            said[GROUP].startswith("PeerLostError: epoch 1 of the job has broken: rank ") and "rank 0 has ended" in said[GROUP]
        )
    complete = sorted(path.parent.name for path in (tmp_path / "True").glob("*/.metadata"))
    assert complete == [f"step-{step}" for step in range(STEPS) if step not in (FULL, LOST, GROUP)]
