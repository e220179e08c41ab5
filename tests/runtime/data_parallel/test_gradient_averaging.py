"""Data-parallel replicas compute what one process with all their rows would, and keep buffers as DDP does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from errors_table import check_documented
from models import Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import compiled

import adaptra

ROWS, STEPS = 8, 3
SYNC = (
    "model: a SyncBatchNorm…: expected a BatchNorm, as the model has before convert_sync_batchnorm: it averages over the ranks "
    "of one forward call, and the ranks of a pipeline hold different stages; a GroupNorm or a LayerNorm needs no other rows"
)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


DROPPING = Example("dropping", dropping, vectors(8), square_loss)
NORMED = Example("normed", normed, vectors(8), square_loss)


def part(batch: Any, rank: int) -> tuple[Tensor, Tensor]:
    """One replica's half of a batch."""
    ((inputs,), _, targets) = batch
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    return inputs[rows], targets[rows]


def draw(pipe: adaptra.Pipeline, rank: int | None) -> list[dict[str, Any]]:
    """Losses and gradients of some steps on a replica's rows, or on all of them."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found: list[dict[str, Any]] = []
    for step in range(STEPS):
        (inputs,), _, targets = batch = DROPPING.rows(2 * ROWS, step)
        loss = pipe.step(inputs, targets) if rank is None else pipe.step(*part(batch, rank))
        found.append({name: one.grad.numpy().copy() for name, one in pipe.named_parameters() if one.grad is not None})
        found[-1]["loss"] = loss.numpy()
        optimizer.step()
        optimizer.zero_grad()
    return found


def statistics(model: Any) -> dict[str, Any]:
    """Copies of the buffers of a model, or of a pipeline."""
    state = model.state_dict()
    return {name: state[name].numpy().copy() for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked")}


def train_replicas(rank: int) -> dict[str, Any]:
    """Two replicas of one stage, and DDP, on the same rows; buffers that are the replicas' own; and evaluation."""
    torch.distributed.init_process_group("gloo")
    found: dict[str, Any] = {}
    for microbatches in (1, 2):
        with compiled(DROPPING, DROPPING.rows(ROWS, 0), stages=1, microbatches=microbatches) as pipe:
            assert (pipe.replicas, pipe.replica) == (2, rank)
            found[f"drawn {microbatches}"] = draw(pipe, rank)
    for name, broadcast in (("shared", True), ("own", False)):
        plain = DistributedDataParallel(NORMED.make(), broadcast_buffers=broadcast)
        options = adaptra.Options(broadcast_buffers=broadcast)
        with compiled(NORMED, NORMED.rows(ROWS, 0), stages=1, microbatches=1, options=options) as pipe:
            buffers, evaluated = [], []
            for step in range(STEPS):
                inputs, targets = part(NORMED.rows(2 * ROWS, step), rank)
                plain.train()
                square_loss(plain(inputs), targets).backward()
                stepped = pipe.step(inputs, targets)
                buffers.append((statistics(pipe), statistics(plain.module)))
                evaluation = pipe.eval_step(inputs, targets)
                plain.eval()
                theirs = square_loss(plain(inputs), targets).detach()
                torch.distributed.all_reduce(theirs)
                evaluated.append((evaluation.item(), theirs.item() / 2, stepped.item()))
                buffers.append((statistics(pipe), statistics(plain.module)))
        found[name] = (buffers, evaluated)
    return found


@pytest.mark.processes
def test_replicas_draw_as_one_process_does_and_keep_buffers_as_ddp_does(one_thread: None) -> None:
    results = run_processes(train_replicas, 2)
    for microbatches in (1, 2):
        with compiled(DROPPING, DROPPING.rows(2 * ROWS, 0), stages=1, microbatches=2 * microbatches) as pipe:
            assert (pipe.replicas, pipe.replica) == (1, 0)
            alone = draw(pipe, None)
        for found in results:
            for step, (mine, expected) in enumerate(zip(found[f"drawn {microbatches}"], alone, strict=True)):
                for name, value in expected.items():
                    # With one microbatch each both add the same two numbers; with more they add them in another order.
                    np.testing.assert_allclose(
                        mine[name], value, rtol=0 if microbatches == 1 else 1e-4, err_msg=f"{step} {name}"
                    )
    for name, are_equal in (("shared", True), ("own", False)):
        for rank, found in enumerate(results):
            buffers, evaluated = found[name]
            for index, (mine, ddp) in enumerate(buffers):
                for buffer, value in ddp.items():
                    np.testing.assert_array_equal(mine[buffer], value, err_msg=f"{name} {rank} {index} {buffer}")
            for mine, ddp, _ in evaluated:
                assert mine == pytest.approx(ddp, rel=1e-6), (name, rank)
        (first, evaluated), (second, other) = (found[name] for found in results)
        assert evaluated == other, "all ranks are told the same numbers"
        running = [[mine["1.running_mean"] for mine, _ in buffers] for buffers in (first, second)]
        same = [np.array_equal(one, theirs) for one, theirs in zip(*running, strict=True)]
        # Each trains on rows of its own; what evaluates has the first replica's.
        assert same == ([False, True] if are_equal else [False, False]) * STEPS


def test_synchronized_statistics_are_refused(one_thread: None) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(NORMED.make())
    with pytest.raises(adaptra.errors.OptionError) as error:
        adaptra.compile(model, stages=1, microbatches=2, loss=square_loss)
    check_documented("OptionError", str(error.value), SYNC)
    assert "a SyncBatchNorm at '1'" in str(error.value)


def test_what_is_broadcast_is_a_flag() -> None:
    wrong: Any = 1
    with pytest.raises(adaptra.errors.OptionError, match="broadcast_buffers=1: expected True or False"):
        adaptra.Options(broadcast_buffers=wrong)


def lose_a_peer(rank: int) -> str | None:
    """Rank 0 fails while rank 1 waits for its part of a sum."""
    import torch.distributed as dist

    from adaptra.errors import PeerLostError
    from adaptra.program.roles import Roles
    from adaptra.runtime.data_parallel.gradient_averaging import Replicas
    from adaptra.runtime.launch.launch import HOST
    from adaptra.runtime.transports.process_groups import keys_of
    from adaptra.runtime.world.world import WorkerId, World

    dist.init_process_group("gloo")
    store = keys_of("test of replicas")
    replicas = Replicas(World.of_roles(Roles.initial(2, 1)), WorkerId(rank), "test", HOST)
    if rank == 0:
        replicas.abort()
        store.wait(["told"])
        return None
    with pytest.raises(PeerLostError) as lost:
        replicas.combine_losses(torch.ones(3))
    store.set("told", "")
    assert lost.value.rank == 0
    return str(lost.value)


def test_a_replica_that_fails_ends_the_sums_of_the_others() -> None:
    _, message = run_processes(lose_a_peer, 2)
    check_documented("PeerLostError", message, "rank … is lost: a data-parallel replica is lost: …")
