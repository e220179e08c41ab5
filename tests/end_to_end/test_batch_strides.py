"""Batches of any strides: a replica that computes another one's microbatches sees the strides that their home sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Example, square_loss
from processes import run_processes
from torch import Tensor, nn
from training import adam, call, compiled

import adaptra
from adaptra.planning.routes.job_planner import plan_job
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.runtime.control.plans.plan import Plan
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

pytestmark = pytest.mark.processes

MICROBATCHES, WIDTH, STEPS = 8, 96, 3
ROWS = 2 * MICROBATCHES


def batches(make: Callable[[torch.Generator], Tensor]) -> Callable[[int, int], Any]:
    """Batches whose targets are as their inputs."""

    def batch(_rows: int, seed: int) -> Any:
        source = torch.Generator().manual_seed(seed)
        return (make(source),), {}, make(source)

    return batch


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def filters() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))


def images(source: torch.Generator) -> Tensor:
    return torch.randn(ROWS, 3, 16, 16, generator=source).to(memory_format=torch.channels_last)


EXAMPLES = {
    "transposed": Example("t", layers, batches(lambda source: torch.randn(WIDTH, ROWS, generator=source).t()), square_loss),
    "channels last": Example("c", filters, batches(images), square_loss),
    "columns of a table": Example(
        "g", layers, batches(lambda source: torch.randn(ROWS, 2 * WIDTH, generator=source)[:, ::2]), square_loss
    ),
    "repeated": Example(
        "r", layers, batches(lambda source: torch.randn(ROWS, 1, generator=source).expand(ROWS, WIDTH)), square_loss
    ),
}
CASE = Case(CostModel.uniform(1, 1.0, 1.0, 1.0), MICROBATCHES, (0,))


def shared() -> Program:
    """The second worker computes most of the first one's microbatches."""
    paths = [[(int(number > 2),) for number in range(MICROBATCHES)], [(1,)] * MICROBATCHES]
    return plan_job(CASE.of_replicas(2), routing=Routing.of_paths(((0,), (1,)), paths))


def train(example: Example, *, steals: bool, program: Program | None = None) -> tuple[list[list[bytes]], int]:
    """What a rank has after each step, and how many microbatches moved."""
    moved: list[adaptra.ControlEvent] = []
    options = adaptra.Options(
        synchrony=adaptra.Stealing() if steals else "exact",
        share=False,
        adapt=False,
        faults=(f"slow 1.0 40ms @0..{STEPS}",) if steals else (),
        emulate=adaptra.EmulatedDevice(0.003, 0.003, 0.003) if steals else None,
        on_event=lambda event: moved.append(event) if event.kind.value == "stolen" else None,
    )
    found: list[list[bytes]] = []
    with compiled(example, example.rows(ROWS, 0), stages=1, microbatches=MICROBATCHES, options=options) as pipe:
        (worker,) = pipe.session.workers
        optimizer, away = adam(pipe.parameters()), 0
        if program is not None:
            worker.controller.plan_for = lambda step: Plan(1, program, CASE, 1.0, 1.0, "a share")
        for step in range(STEPS):
            args, kwargs = call(example.rows(ROWS, 100 * pipe.replica + step))
            losses = [pipe.step(*args, **kwargs), pipe.microbatch_losses]
            away += any(route.workers != (route.replica,) for route in pipe.routes)
            optimizer.step()
            optimizer.zero_grad()
            state = [one for _, one in sorted(pipe.state_dict().items())]
            found.append([one.detach().numpy().tobytes() for one in (*losses, *state) if one is not None])
    return found, len(moved) + away


def body(_rank: int) -> dict[str, list[tuple[list[list[bytes]], int]]]:
    program = shared()
    return {
        name: [train(one, steals=False), train(one, steals=False, program=program), train(one, steals=True)]
        for name, one in EXAMPLES.items()
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[tuple[list[list[bytes]], int]]]]:
    return run_processes(body, 2)


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_bit_depends_on_who_computes_a_microbatch(found: Any, name: str) -> None:
    for alone, shared, stolen in (rank[name] for rank in found):
        assert (shared[0] == alone[0], stolen[0] == alone[0]) == (True, True)
        assert (alone[1], shared[1]) == (0, STEPS)
    assert found[1][name][2][1], "the slow replica was helped"
