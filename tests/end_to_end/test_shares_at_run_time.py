"""Replicas share a slow worker's microbatches by themselves, and take them back: same steps on all ranks, no number changed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from processes import run_processes

from adaptra.runtime.control.events import ControlEvent, EventKind

pytestmark = pytest.mark.processes

ROWS, REPLICAS, STAGES, MICROBATCHES = 8, 2, 3, 4
STEPS, ONSET, HEALED = 28, 8, 18


class Trained(NamedTuple):
    """One rank: its losses, hashes of its state by name, its events of routes by step, and the routes after some steps."""

    losses: list[float]
    state: dict[str, str]
    told: list[tuple[int, str]]
    routes: dict[int, list[str]]


def train(faults: Sequence[str]) -> Trained:
    """Train with dropout, clipping, accumulation and evaluation, under plans that the controller chooses."""
    import torch
    from models import EXAMPLES
    from training import adam, call, compiled

    import adaptra

    example = EXAMPLES["gpt_dropout"]
    told: list[ControlEvent] = []
    device = adaptra.EmulatedDevice(0.02, 0.02, 0.02)
    options = adaptra.Options(schedule="1f1b", faults=faults, emulate=device, on_event=told.append)
    losses, routes = [], {}
    with compiled(example, example.rows(ROWS, 0), stages=STAGES, microbatches=MICROBATCHES, options=options) as pipe:
        assert pipe.workers == tuple(range(REPLICAS * STAGES))
        optimizer = adam(pipe.parameters())
        for step in range(STEPS):
            args, kwargs = call(example.rows(ROWS, 2 * step + pipe.replica))
            losses.append(pipe.step(*args, **kwargs).item())
            routes[step] = [str(route) for route in pipe.routes]
            if step % 3 == 2:
                pipe.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            if step % 8 == 7:
                losses.append(pipe.eval_step(*args, **kwargs).item())
        state = {
            name: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, value in pipe.state_dict().items()
        }
    routed = [event for event in told if event.kind in (EventKind.SHARED, EventKind.DETOURED)]
    for event in routed:
        assert event.predicted is not None and event.predicted_before is not None and event.predicted < event.predicted_before
    return Trained(losses, state, [(event.step, event.text) for event in routed], routes)


def train_with_and_without(rank: int) -> tuple[Trained, Trained]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return train(()), train([f"slow 1.1 2x @{ONSET}..{HEALED}"])


def test_a_slow_worker_gives_microbatches_away_while_it_is_slow() -> None:
    """How soon depends on how steady this machine is: ``bench/shares.py`` measures it."""
    results = run_processes(train_with_and_without, REPLICAS * STAGES)
    for rank, (healthy, slow) in enumerate(results):
        assert slow[:2] == healthy[:2], f"rank {rank} has other numbers"
    _, first = results[0]
    for _, slow in results:
        assert (slow.told, slow.routes) == (first.told, first.routes)
    onsets = [step for step, text in first.told if step > ONSET and "of worker 1.1 run on 0.1" in text]
    assert onsets and onsets[0] <= HEALED, first.told
    assert any("by 3,1,5" in route for route in first.routes[onsets[0]]), first.routes
    home = ["route 0 0-3 by 0,1,2", "route 1 0-3 by 3,4,5"]
    assert first.routes[ONSET] == home and home in [first.routes[step] for step in range(HEALED + 1, STEPS)], first.routes
