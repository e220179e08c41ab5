"""Sites that are at different steps: what all ranks wait for together, and the number of updates meanwhile."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from processes import run_processes
from test_x_order import MICROBATCHES, MODEL, adam, bits_of, rows_of
from training import call, compiled

import adaptra
from adaptra.planning.synchrony.modes import Apart

pytestmark = [pytest.mark.processes]


def job(mode: Apart) -> Any:
    options = adaptra.Options(synchrony=mode, timeout=20.0)
    return compiled(MODEL, rows_of(0, 0), stages=1, microbatches=MICROBATCHES, options=options)


def train(pipe: adaptra.Pipeline, optimizer: torch.optim.Optimizer, steps: range) -> list[int]:
    """The number of updates after each step. The last replica is late: the others have made all steps when it makes another."""
    updates: list[int] = []
    for number in steps:
        if pipe.replica == pipe.replicas - 1 and number > steps[0]:
            time.sleep(0.5)
        args, kwargs = call(rows_of(pipe.replica, number))
        pipe.step(*args, **kwargs)
        optimizer.step()
        optimizer.zero_grad()
        updates.append(pipe.updates)
    return updates


def meets(_rank: int) -> list[Any]:
    found: list[Any] = []
    for mode in (adaptra.XOrder(2), adaptra.Local(1, quorum=2, grace=0.0)):
        with job(mode) as pipe:
            optimizer = adam(pipe.parameters())
            pipe.attach(optimizer)
            updates = train(pipe, optimizer, range(3))
            pipe.load_state_dict({name: one.clone() for name, one in pipe.state_dict().items()})
            found.append(bits_of(pipe.named_parameters()))
            updates += train(pipe, optimizer, range(3, 6))
            batches = [args for args, _ in (call(rows_of(pipe.replica, 6)),)]
            trial = pipe.settle_synchrony(batches, allow=[adaptra.Local(1)], rounds=3)
            assert trial is not None
            assert updates == sorted({*updates}) and pipe.updates >= updates[-1]
            found.append((trial.chosen, pipe.updates, bits_of(pipe.named_parameters())))
    return found


def test_a_replica_that_is_behind_is_waited_for_before_a_state_is_loaded_or_modes_are_tried() -> None:
    """It needs the others for its updates until it comes to the same call."""
    one, *others = run_processes(meets, 3)
    assert all(one == other for other in others)
