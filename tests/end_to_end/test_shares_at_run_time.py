"""Replicas share a slow worker's microbatches by themselves, and take them back: same steps on all ranks, no number changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from processes import run_processes

from adaptra.runtime.control.plans.events import ControlEvent, EventKind

pytestmark = [pytest.mark.processes, pytest.mark.alone]

ROWS, MICROBATCHES = 8, 4
STEPS, ONSET, HEALED = 28, 8, 18


@dataclass(frozen=True)
class Shared:
    """A job, its slow worker, and the text of its events.

    Attributes:
        example: The model.
        replicas, placed: The number of replicas, and the rank of each stage.
        slow: The worker that turns slow.
        moved: The text that says which microbatches move.
        options: More options.
    """

    example: str
    replicas: int
    placed: tuple[int, ...]
    slow: str
    moved: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ranks(self) -> int:
        """Those of a replica."""
        return max(self.placed) + 1


EACH_ITS_OWN: Mapping[str, Any] = {"broadcast_buffers": False, "lossy_bf16": True}
JOBS = {
    "dropout": Shared("gpt_dropout", 2, (0, 1, 2), "1.1", "of worker 1.1 run on 0.1"),
    "buffers and rounded messages of three replicas": Shared("mixed", 3, (0, 1), "1.1", "of worker 1.1 run on", EACH_ITS_OWN),
    "shared buffers over the delegate": Shared(
        "mixed", 2, (0, 1, 2), "1.1", "of worker 1.1 run on 0.1", {"delegate": [(0, 1)]}
    ),
    "tied weights of a V": Shared("gpt_tied", 2, (0, 1, 1, 0), "1.1", "of worker 1.1 run on 0.1"),
}


class Trained(NamedTuple):
    """One rank: its losses, hashes of its state by name, its events of routes by step, and the routes after some steps."""

    losses: list[float]
    state: dict[str, str]
    told: list[tuple[int, str]]
    routes: dict[int, list[str]]


def train(job: Shared, faults: Sequence[str]) -> Trained:
    """Train with dropout, clipping, accumulation and evaluation, under plans that the controller chooses."""
    import torch
    from models import EXAMPLES
    from training import MIXED, adam, call, compiled

    import adaptra

    example = MIXED if job.example == MIXED.name else EXAMPLES[job.example]
    told: list[ControlEvent] = []
    device = adaptra.EmulatedDevice(0.02, 0.02, 0.02)
    schedule, placement = ("1f1b", "straight") if len(job.placed) == job.ranks else ("zbv", "v")
    options = adaptra.Options(schedule=schedule, faults=faults, emulate=device, on_event=told.append, **job.options)
    arguments: dict[str, Any] = {"stages": len(job.placed), "microbatches": MICROBATCHES, "options": options}
    arguments["placement"] = placement
    losses, routes = [], {}
    with compiled(example, example.rows(ROWS, 0), **arguments) as pipe:
        assert pipe.workers == tuple(range(job.replicas * job.ranks))
        kept = "no replica computes another one's microbatches on stage 0, which shares "
        assert (kept in pipe.explain()) == (len(job.placed) > job.ranks)
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
            name: hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
            for name, value in pipe.state_dict().items()
        }
    routed = [event for event in told if event.kind in (EventKind.SHARED, EventKind.DETOURED)]
    for event in routed:
        assert event.predicted is not None and event.predicted_before is not None and event.predicted < event.predicted_before
    return Trained(losses, state, [(event.step, event.text) for event in routed], routes)


def train_with_and_without(rank: int, job: Shared) -> tuple[Trained, Trained]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return train(job, ()), train(job, [f"slow {job.slow} 2x @{ONSET}..{HEALED}"])


@pytest.mark.parametrize("name", JOBS)
def test_a_slow_worker_gives_microbatches_away_while_it_is_slow(name: str) -> None:
    """How soon depends on how steady this machine is: ``bench/shares.py`` measures it."""
    job = JOBS[name]
    results = run_processes(train_with_and_without, job.replicas * job.ranks, job)
    for rank, (healthy, slow) in enumerate(results):
        assert slow[:2] == healthy[:2], f"rank {rank} has other numbers"
    _, first = results[0]
    for _, slow in results:
        assert (slow.told, slow.routes) == (first.told, first.routes)
    onsets = [step for step, text in first.told if step > ONSET and job.moved in text]
    assert onsets and onsets[0] <= HEALED, first.told
    rows = [[replica * job.ranks + rank for rank in job.placed] for replica in range(job.replicas)]
    home = [f"route {replica} 0-3 by {','.join(map(str, row))}" for replica, row in enumerate(rows)]
    assert first.routes[onsets[0]] != home, first.routes
    assert first.routes[ONSET] == home and home in [first.routes[step] for step in range(HEALED + 1, STEPS)], first.routes
