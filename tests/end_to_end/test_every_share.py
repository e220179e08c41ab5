"""Every share of every stage runs with batches of all shapes, beside weights that stages share: no job ends, no bit changes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple

import pytest
from processes import run_processes

from adaptra.planning.routes.job_planner import plan_job
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

pytestmark = pytest.mark.processes

MICROBATCHES, ROWS = 4, 8
CASE = Case(CostModel.uniform(2, 1.0, 1.0, 1.0), MICROBATCHES, (0, 1))
HOMES = (0, 1), (2, 3)


class Trained(NamedTuple):
    """One rank: the losses of each step, digests of its state by name, and the number of steps that left home."""

    losses: list[float]
    state: dict[str, str]
    away: int


def every_share() -> list[Program]:
    """Programs in which a worker gives away some of its microbatches, or all of them, to the other replica's."""
    numbers = range(MICROBATCHES)
    given = list(chain.from_iterable(combinations(numbers, count) for count in range(1, MICROBATCHES + 1)))
    found: list[Program] = []
    for replica, stage in ((0, 0), (0, 1), (1, 0), (1, 1)):
        helper = HOMES[1 - replica][stage]
        for away in given:
            paths = [[list(home) for _ in numbers] for home in HOMES]
            for number in away:
                paths[replica][number][stage] = helper
            routing = Routing.of_paths(HOMES, [[tuple(path) for path in of_replica] for of_replica in paths])
            found.append(plan_job(CASE.of_replicas(2), routing=routing))
    return found


def train(rank: int, programs: Sequence[Program]) -> tuple[Trained, Trained]:
    """A step under each program, and then without; from time to time with fewer rows, or one replica's shorter rows."""
    import torch
    import torch.distributed as dist
    from models import GPT, Example, token_loss, tokens
    from training import adam, call, compiled

    import adaptra
    from adaptra.runtime.control.plans.plan import Plan

    dist.init_process_group("gloo")
    example: Any = Example("tied", lambda: GPT(blocks=2, width=8, heads=2, dropout=0.1, tied=True), tokens, token_loss)  # pyright: ignore[reportArgumentType]

    def batch(step: int, replica: int) -> Any:
        (given,), kwargs, targets = example.rows(ROWS, 2 * step + replica)
        rows = 4 if step % 5 == 2 else ROWS
        length = 9 if step % 5 == 3 + replica else 16
        return (given[:rows, :length],), kwargs, targets[:rows, :length]

    def train_under(routed: bool) -> Trained:
        options = adaptra.Options(schedule="1f1b", adapt=False)
        arguments: dict[str, Any] = {"stages": 2, "microbatches": MICROBATCHES, "options": options}
        with compiled(example, batch(0, 0), **arguments) as pipe:
            (worker,) = pipe.session.workers
            plans = [Plan(number + 1, one, CASE, 1.0, 1.0, "a share") for number, one in enumerate(programs)]
            optimizer = adam(pipe.parameters())
            losses: list[float] = []
            away = 0
            for step, plan in enumerate(plans):
                if routed:
                    worker.controller.plan_for = lambda step, plan=plan: plan
                args, kwargs = call(batch(step, pipe.replica))
                losses.append(pipe.step(*args, **kwargs).item())
                away += any(len({one // 2 for one in route.workers}) > 1 for route in pipe.routes)
                if step % 2:
                    pipe.clip_grad_norm_(0.5)
                    optimizer.step()
                    optimizer.zero_grad()
            state = {
                name: hashlib.sha256(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
                for name, value in pipe.state_dict().items()
            }
            return Trained(losses, state, away)

    return train_under(False), train_under(True)


def test_shares_of_tied_stages_change_no_number_whatever_the_batches_are() -> None:
    """Steps of another shape in any replica run at home on all of them."""
    programs = every_share()
    assert len(programs) == 60
    for rank, (at_home, shared) in enumerate(run_processes(train, 4, programs)):
        assert shared[:2] == at_home[:2], f"rank {rank}"
        assert at_home.away == 0
        assert 20 < shared.away < 60
