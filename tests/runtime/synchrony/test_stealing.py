"""Replicas take microbatches that others have not begun, and every bit stays as in a step in which nobody does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import Example, square_loss, vectors
from processes import run_processes
from test_local_steps import Tied
from torch import Tensor
from training import call, compiled

import adaptra

pytestmark = pytest.mark.processes

WIDTH, STEPS = 24, 4
SLOW = range(1, 3)
"""The steps in which a worker is slow."""


SHARED = Example("shared", lambda: Tied(WIDTH, dropout=0.2), vectors(WIDTH), square_loss)


def run(
    synchrony: Any,
    stages: int,
    microbatches: int,
    slow: str | None = None,
    outputs_in: Sequence[int] = (),
    longer_in: Sequence[int] = (),
    *,
    shards: bool = False,
) -> dict[str, Any]:
    """What a rank has after each step, and what it has been told."""
    events: list[adaptra.ControlEvent] = []
    faults = () if slow is None else (f"slow {slow} 40ms @{SLOW.start}..{SLOW.stop}",)
    options = adaptra.Options(
        synchrony=synchrony,
        share=False,
        faults=faults,
        emulate=adaptra.EmulatedDevice(0.003, 0.003, 0.003),
        on_event=events.append,
    )
    rows = 2 * microbatches
    with compiled(SHARED, SHARED.rows(rows, 0), stages=stages, microbatches=microbatches, options=options) as pipe:
        inner: Any = pipe.shard(torch.optim.SGD, lr=0.1) if shards else torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5)
        bits = list[list[Tensor | None]]()
        for step in range(STEPS):
            args, kwargs = call(SHARED.rows(rows * (1 + (step in longer_in)), 100 * pipe.replica + step))
            found: Any = pipe.step(*args, **kwargs, outputs=step in outputs_in)
            if step != SLOW.start:  # the next step adds to this one's gradients
                inner.step()
                inner.zero_grad(set_to_none=step % 2 == 0)
            parameters = [one.detach().clone() for _, one in sorted(pipe.named_parameters())]
            bits.append([*parameters, pipe.microbatch_losses, *(found if step in outputs_in else [found])])
        explained = pipe.explain()
        pipe.timeline()
    told = [(one.step, one.text) for one in events if one.kind.value == "stolen"]
    as_bytes = [[None if one is None else one.numpy().tobytes() for one in step] for step in bits]
    return {"bits": as_bytes, "told": told, "explained": explained, "replica": pipe.replica}


def body(rank: int) -> dict[str, Any]:
    steals = adaptra.Stealing()
    return {
        "first stage": (run("exact", 2, 8), run(steals, 2, 8, slow="1.0")),
        "last stage": (run("exact", 2, 6), run(steals, 2, 6, slow="0.1")),
        "one stage": (run("exact", 1, 6), run(adaptra.Stealing(most=2), 1, 6, slow="2.0")),
        "stays at home": (
            run("exact", 2, 6, outputs_in=[1], longer_in=[0]),
            run(steals, 2, 6, slow="1.0", outputs_in=[1], longer_in=[0]),
        ),
        "sharded": (run("exact", 2, 4, shards=True), run(steals, 2, 4, slow="1.1", shards=True)),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_processes(body, 4)


@pytest.mark.parametrize("case", ["first stage", "last stage", "one stage", "stays at home", "sharded"])
def test_every_bit_is_that_of_an_undisturbed_step(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        exact, stealing = rank[case]
        assert stealing["bits"] == exact["bits"]
        assert not exact["told"]


@pytest.mark.parametrize(
    ("case", "victim", "most"),
    [("first stage", 1, 4), ("last stage", 0, 3), ("one stage", 2, 2), ("stays at home", 1, 3), ("sharded", 1, 2)],
)
def test_what_was_taken_is_told(found: list[dict[str, Any]], case: str, victim: int, most: int) -> None:
    taken = {
        step: [(int(taker), numbers.split(", ")) for taker, numbers in re.findall(r"replica (\d) took ([\d, ]+)", text)]
        for rank in found
        for step, text in rank[case][1]["told"]
        if rank[case][1]["replica"] == victim
    }
    expected = [2] if case == "stays at home" else [*SLOW]
    assert set(expected) <= set(taken), "a replica that is slow is helped"
    assert case != "stays at home" or {0, 1}.isdisjoint(taken), "outputs, or another shape of batch"
    for by in taken.values():
        assert all(len(numbers) <= most and taker != victim for taker, numbers in by)
    given = sum(len(numbers) for by in taken.values() for _, numbers in by)
    for rank in found:
        if rank[case][1]["replica"] == victim:
            assert f"others have taken {given} of its own" in rank[case][1]["explained"]
