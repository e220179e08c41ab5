"""Faults of single workers and of one replica's edges, in training over gloo: who is slow, and that no number changes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from errors_table import check_documented
from processes import run_processes

pytestmark = [pytest.mark.processes, pytest.mark.alone]

ROWS, STEPS = 8, 7
# Above what anything takes by itself, and below what the faults add: clocks of two processes differ by what was estimated.
SLOW, LATE, FROZEN = 0.03, 0.08, 1.5
FAULTS = ("slow 1.1 50ms @1..3", "delay 0-1@replica0 150ms @1..3", "freeze 0.1 @3:1F0 2s", "slow 1.1 50ms @5")
CHANGE = 4


class Step(NamedTuple):
    """One step of one rank: its duration, its shortest and longest op, the shortest flight of a message to it; seconds."""

    seconds: float
    shortest_op: float
    longest_op: float
    flight: float


class Trained(NamedTuple):
    """One rank: the losses of all steps, hashes of its state by name, its replica and stage in the end, and its steps."""

    losses: list[float]
    state: dict[str, str]
    role: tuple[int, int]
    steps: list[Step]


def train(rank: int, faults: Sequence[str], change: int | None = None) -> Trained:
    """Two replicas of two stages. The two ranks of stage 1 swap roles before step ``change``."""
    import torch
    import torch.distributed as dist
    from training import MIXED, compiled

    import adaptra

    batches = [MIXED.rows(2 * ROWS, seed=step) for step in range(STEPS)]
    device = adaptra.EmulatedDevice(0.002, 0.002, 0.002)
    options = adaptra.Options(adapt=False, faults=faults, emulate=device)
    losses, steps = [], []
    with compiled(MIXED, MIXED.rows(ROWS, seed=0), stages=2, microbatches=4, options=options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step, ((inputs,), _, targets) in enumerate(batches):
            if step == change:
                assert pipe.roles is not None
                pipe.take_roles(pipe.roles.swapped(1, 3), optimizer)
            half = slice(pipe.replica * ROWS, (pipe.replica + 1) * ROWS)
            losses.append(pipe.step(inputs[half], targets[half]).item())
            optimizer.step()
            optimizer.zero_grad()
            assert pipe._session is not None
            records = pipe._session.workers[0].monitor.records(step)
            ops = [end - start for _, start, end in records.ops]
            flights = [one.arrived_at - one.sent_at for one in records.messages]
            steps.append(Step(records.end - records.start, min(ops), max(ops), min(flights)))
        dist.barrier()
        state = {name: hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest() for name, value in pipe.state_dict().items()}
        assert pipe.roles is not None
        return Trained(losses, state, pipe.roles.of(rank), steps)


def train_with_and_without(rank: int) -> tuple[str, Trained, Trained]:
    """The error for a fault of a replica that does not exist; a run without faults, and one with faults."""
    import torch.distributed as dist

    from adaptra.errors import CaseError

    dist.init_process_group("gloo")
    with pytest.raises(CaseError) as refused:
        train(rank, ["slow 2.0 2x"])
    return str(refused.value), train(rank, ()), train(rank, FAULTS, CHANGE)


def test_faults_hit_their_workers_alone_and_change_no_number() -> None:
    """After two ranks have swapped roles, another rank is worker 1.1 and slow."""
    results = run_processes(train_with_and_without, 4)
    for refused, *_ in results:
        check_documented("CaseError", refused, "fault '…': there is no replica …: expected replicas of 0..…")
        assert "slow 2.0 2x" in refused and "0..1" in refused
    healthy, ran = ([result[which] for result in results] for which in (1, 2))
    numbers = [{one.role: (one.losses, one.state) for one in run} for run in (healthy, ran)]
    assert numbers[0] == numbers[1]
    assert [one.role for one in ran] == [(0, 0), (1, 1), (1, 0), (0, 1)]
    slow = {(rank, step) for rank, one in enumerate(ran) for step in range(STEPS) if one.steps[step].shortest_op >= SLOW}
    assert slow == {(3, 1), (3, 2), (1, 5), (1, 6)}
    late = {(rank, step) for rank, one in enumerate(ran) for step in range(STEPS) if one.steps[step].flight >= LATE}
    assert late == {(0, 1), (0, 2), (1, 1), (1, 2)}
    frozen = {(rank, step) for rank, one in enumerate(ran) for step in range(STEPS) if one.steps[step].longest_op >= FROZEN}
    assert frozen == {(1, 3)}
    for one in ran:
        assert [step for step in range(STEPS) if one.steps[step].seconds >= FROZEN] == [3]
