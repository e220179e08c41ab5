"""Groups of which torch.distributed has no record: made among any processes, more than once, and ended as a whole."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from errors_table import check_documented
from open_files import more_open, open_files
from processes import run_processes

from adaptra.errors import LaunchError
from adaptra.program.roles import Roles
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.launch.launch import HOST
from adaptra.runtime.transports.process_groups import Members, new_group
from adaptra.runtime.world.world import ProcessId, WorkerId, World

pytestmark = pytest.mark.processes

RANKS, LOST = 3, 1
EPOCHS = 12


def survive(rank: int) -> tuple[list[float], list[list[int]]] | None:
    """What the others sum among themselves once one has died, beside groups that still have it as a member."""
    dist.init_process_group("gloo")
    before = Replicas(World.of_roles(Roles.initial(RANKS, 1)), WorkerId(rank), "epoch 0", HOST)
    assert before.combine_losses(torch.tensor([float(rank)]), mean=False).item() == sum(range(RANKS))
    if rank == LOST:
        os._exit(1)
    world = World(1, 1, (ProcessId(0), ProcessId(2)), (0, 1))
    (worker,) = world.hosted(ProcessId(rank))
    after = Replicas(world, worker, "epoch 1", HOST)
    summed = after.combine_losses(torch.tensor([float(rank), 1.0]), mean=False, aside=True).tolist()
    numbers = after.gather([rank])
    assert after.any_has(rank == 2) and not after.any_has(False)
    assert after.values_of(0, [torch.tensor([rank])])[0].item() == 0
    assert after.ranks == (0, 2)
    after.end()
    before.abort()
    return summed, numbers


def test_survivors_make_groups_of_their_own() -> None:
    found = run_processes(survive, RANKS, may_die=(LOST,))
    assert [found[0], found[2]] == [([2.0, 2.0], [[0], [2]])] * 2


def in_turn(rank: int) -> int:
    """How many more files this process has open after the last of some epochs than after the first."""
    dist.init_process_group("gloo")
    before = 0
    for epoch in range(EPOCHS):
        world = World(epoch, 1, (ProcessId(epoch % 2), ProcessId(1 - epoch % 2)), (epoch % 2, 1 - epoch % 2))
        (worker,) = world.hosted(ProcessId(rank))
        replicas = Replicas(world, worker, f"epoch {epoch}", HOST)
        assert replicas.gather([rank]) == [[epoch % 2], [1 - epoch % 2]]
        replicas.end()
        replicas.end()
        del replicas
        before = before or open_files()
    assert not any("epoch" in name for name in dist.distributed_c10d._world.pg_names.values())
    more = more_open(before, EPOCHS // 2)
    dist.barrier()
    return more


def test_groups_of_epochs_that_have_ended_leave_nothing_open() -> None:
    more = run_processes(in_turn, 2)
    assert max(more) <= EPOCHS // 2, more


def refuse(rank: int) -> tuple[str, str]:
    """What another backend is told."""
    dist.init_process_group("gloo")
    with pytest.raises(LaunchError) as error:
        new_group(Members("test", rank, 1), "mpi")
    return type(error.value).__name__, str(error.value)


def test_other_backends_are_refused() -> None:
    ((kind, message),) = run_processes(refuse, 1)
    check_documented(kind, message, "init_process_group(…): expected gloo or NCCL, over which replicas average gradients")
