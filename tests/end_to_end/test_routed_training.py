"""Replicas that follow given routes train bitwise as without routes: shares and detours change no number (rule 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from processes import run_processes

from adaptra.planning.replicas.job_planner import plan_job
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.simulation.cost import Case, CostModel
from adaptra.simulation.job_case import JobCase

pytestmark = pytest.mark.processes

MICROBATCHES, ROWS = 4, 8
FIRST, SECOND = (0, 1, 2), (3, 4, 5)
PATHS: Mapping[str, Sequence[Sequence[tuple[int, ...]]]] = {
    "a share of the middle stage": [[FIRST] * 4, [SECOND, (3, 1, 5), (3, 1, 5), SECOND]],
    "shares of the first and the last stage": [[FIRST, (3, 1, 2), (0, 1, 5), FIRST], [SECOND] * 4],
    "exchanged paths": [[(0, 4, 5)] * 4, [(3, 1, 2)] * 4],
    "detours": [[FIRST, (0, 4, 5), (0, 4, 2), FIRST], [SECOND, (3, 1, 2), (3, 1, 5), SECOND]],
}


def routed(paths: Sequence[Sequence[tuple[int, ...]]]) -> Program:
    """The best order found for these paths of each replica's microbatches."""
    case = JobCase.of(Case(CostModel.uniform(3, 1.0, 1.0, 1.0), MICROBATCHES, (0, 1, 2)), 2)
    return plan_job(case, routing=Routing.of_paths((FIRST, SECOND), paths))


def train(schedule: str | Program, example: str = "gpt_dropout", **options: Any) -> dict[str, Any]:
    """What is left of some steps with accumulation, clipping and an evaluation: losses, gradients and the state's digests."""
    import hashlib

    import torch
    from models import EXAMPLES
    from training import MIXED, adam, call, compiled

    import adaptra

    given = MIXED if example == MIXED.name else EXAMPLES[example]
    found: dict[str, Any] = {}
    chosen = adaptra.Options(schedule=schedule, adapt=False, **options)
    with compiled(given, given.rows(ROWS, 0), stages=3, microbatches=MICROBATCHES, options=chosen) as pipe:
        optimizer = adam(pipe.parameters())
        for step in range(4):
            args, kwargs = call(given.rows(ROWS, 2 * step + pipe.replica))
            pipe.step(*args, **kwargs)
            found[f"losses {step}"] = pipe.microbatch_losses.tolist()
            if step in (1, 3):
                found[f"norm {step}"] = pipe.clip_grad_norm_(0.5).item()
                optimizer.step()
                optimizer.zero_grad()
                found[f"evaluation {step}"] = pipe.eval_step(*args, **kwargs).tolist()
        assert pipe.explain() and pipe.report()
        for name, value in pipe.state_dict().items():
            found[name] = hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def train_each(rank: int, jobs: Sequence[tuple[dict[str, Any], Sequence[Program]]]) -> list[list[dict[str, Any]]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [[train(schedule, **variant) for schedule in ("1f1b", *programs)] for variant, programs in jobs]


def test_routes_change_no_number() -> None:
    """Whoever computes the first, a middle or the last stage of a microbatch, with dropout and gradients of two steps."""
    check([({}, list(PATHS))])


def test_buffers_and_tied_weights_keep_the_order_of_their_replica() -> None:
    """Buffers of BatchNorm, shared by the replicas or each with its own, and a weight of both the first and the last stage.

    Losses of evaluations depend on the buffers.
    """
    shares, detours = "shares of the first and the last stage", "detours"
    check([({"example": "mixed"}, [shares]), ({"example": "mixed", "broadcast_buffers": False}, [detours])])


def check(jobs: Sequence[tuple[dict[str, Any], Sequence[str]]]) -> None:
    """Compare jobs with these routes with the same ones without, rank by rank."""
    given = [(variant, [routed(PATHS[name]) for name in names]) for variant, names in jobs]
    for rank, of_jobs in enumerate(run_processes(train_each, 6, given)):
        for (variant, names), (expected, *found) in zip(jobs, of_jobs, strict=True):
            for name, one in zip(names, found, strict=True):
                assert one == expected, f"{name}, {variant}, rank {rank}"
