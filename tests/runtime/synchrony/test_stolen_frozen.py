"""Stages without trainable parameters: others take their microbatches too, and every bit stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Example, square_loss, vectors
from processes import run_processes
from torch import nn
from training import call, compiled

import adaptra

pytestmark = pytest.mark.processes

WIDTH, MICROBATCHES, STEPS = 8, 7, 2
STAGES = {"first": 0, "middle": 1, "last": 2}


def frozen(stage: int) -> Example:
    """Three layers, one of which does not train."""

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in STAGES))
        model[stage].requires_grad_(False)
        return model

    return Example("frozen", build, vectors(WIDTH), square_loss)


def train(stage: int, *, steals: bool) -> dict[str, Any]:
    example = frozen(stage)
    options = adaptra.Options(
        synchrony=adaptra.Stealing() if steals else "exact",
        share=False,
        faults=(f"slow 1.0 40ms @0..{STEPS}",) if steals else (),
        emulate=adaptra.EmulatedDevice(0.003, 0.003, 0.003) if steals else None,
    )
    rows = 2 * MICROBATCHES
    bits: list[list[bytes]] = []
    arguments: dict[str, Any] = {"stages": 3, "split": ["1", "2"], "microbatches": MICROBATCHES, "options": options}
    with compiled(example, example.rows(rows, 0), **arguments) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(STEPS):
            args, kwargs = call(example.rows(rows, 100 * pipe.replica + step))
            loss = pipe.step(*args, **kwargs)
            optimizer.step()
            optimizer.zero_grad()
            state = [one for _, one in sorted(pipe.state_dict().items())]
            bits.append([one.detach().numpy().tobytes() for one in (loss, *state)])
        trains = bool(pipe.session.workers[0].trainable)
        return {"bits": bits, "trains": trains, "given": " 0 of its own" not in pipe.explain(), "place": pipe.rank % 3}


def body(_rank: int) -> dict[str, list[dict[str, Any]]]:
    return {name: [train(stage, steals=False), train(stage, steals=True)] for name, stage in STAGES.items()}


def test_no_bit_is_another_one_and_microbatches_are_taken() -> None:
    found = run_processes(body, 6)
    for name, stage in STAGES.items():
        for rank in found:
            exact, stealing = rank[name]
            assert stealing["bits"] == exact["bits"], name
            assert stealing["trains"] == (stealing["place"] != stage), name
        assert all(rank[name][1]["given"] for rank in found[3:]), f"{name}: the slow replica was helped"
