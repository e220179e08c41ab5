"""Replicas that follow given routes train bitwise as without routes: shares and detours change no number (rule 9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from processes import run_processes

import adaptra
from adaptra.planning.replicas.job_planner import plan_job
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.simulation.cost import Case, CostModel
from adaptra.simulation.job_case import JobCase

pytestmark = pytest.mark.processes

MICROBATCHES, ROWS = 4, 8
FIRST, SECOND = (0, 1, 2), (3, 4, 5)
SHARES = "shares of the first and the last stage"
PATHS: Mapping[str, Sequence[Sequence[tuple[int, ...]]]] = {
    "a share of the middle stage": [[FIRST] * 4, [SECOND, (3, 1, 5), (3, 1, 5), SECOND]],
    SHARES: [[FIRST, (3, 1, 2), (0, 1, 5), FIRST], [SECOND] * 4],
    "exchanged paths": [[(0, 4, 5)] * 4, [(3, 1, 2)] * 4],
    "detours": [[FIRST, (0, 4, 5), (0, 4, 2), FIRST], [SECOND, (3, 1, 2), (3, 1, 5), SECOND]],
}

Training = Callable[[str | Program], dict[str, Any]]


def routed(paths: Sequence[Sequence[tuple[int, ...]]]) -> Program:
    """The best order found for these paths of each replica's microbatches."""
    case = JobCase.of(Case(CostModel.uniform(3, 1.0, 1.0, 1.0), MICROBATCHES, (0, 1, 2)), 2)
    return plan_job(case, routing=Routing.of_paths((FIRST, SECOND), paths))


def train(schedule: str | Program, example: str = "gpt_dropout", transport: str = "c10d", **options: Any) -> dict[str, Any]:
    """What is left of some steps with accumulation, clipping and an evaluation: losses, gradients and the state's digests."""
    import hashlib

    import torch
    from models import EXAMPLES
    from training import MIXED, adam, call, carried, compiled

    import adaptra

    given = MIXED if example == MIXED.name else EXAMPLES[example]
    found: dict[str, Any] = {}
    chosen = adaptra.Options(schedule=schedule, adapt=False, **options)
    how: dict[str, Any] = {"stages": 3, "microbatches": MICROBATCHES, "transport": transport, "options": chosen}
    with compiled(given, given.rows(ROWS, 0), **how) as pipe:
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
        found["delegated"] = carried(pipe) if chosen.uses_delegate else set()
        for name, value in pipe.state_dict().items():
            found[name] = hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def train_with_all(schedule: str | Program, bucket: int | None = None) -> dict[str, Any]:
    """What is left of steps with recomputed blocks, a weighted and scaled loss, and a hook on each parameter.

    The second half runs twice, the second time from a checkpoint that was taken between the halves.
    """
    import copy

    from architectures import Checkpointed
    from models import Example, tokens
    from torch import Tensor
    from torch.nn import functional
    from training import adam, call, compiled

    import adaptra

    def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of every token but some, of which microbatches have unequally many."""
        kept = (targets % 3 != 0).flatten()
        return (functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none") * kept).sum(), kept.sum()

    given: Any = Example("weighted", lambda: Checkpointed(dropout=0.2), tokens, loss)  # pyright: ignore[reportArgumentType]
    found: dict[str, Any] = {}
    chosen = adaptra.Options(schedule=schedule, adapt=False, reduce=adaptra.Reduce(bucket=bucket))
    arguments: dict[str, Any] = {"stages": 3, "microbatches": MICROBATCHES, "reduction": "weighted", "options": chosen}
    with compiled(given, given.rows(ROWS, 0), **arguments) as pipe:
        hooked: list[str] = []
        for name, parameter in pipe.named_parameters():
            parameter.register_hook(lambda gradient, name=name: (hooked.append(name), gradient * 1.5)[1])
        optimizer = adam(pipe.parameters())
        scaler = pipe.grad_scaler(init_scale=2.0**126, growth_interval=1)  # the first gradients overflow

        def half(name: str, first: int) -> None:
            for step in (first, first + 1, first + 2):
                for part in (0, 1):
                    args, kwargs = call(given.rows(ROWS, 4 * step + 2 * part + pipe.replica))
                    pipe.step(*args, **kwargs)
                    found[f"{name}: losses {step} {part}"] = pipe.microbatch_losses.tolist()
                scaler.unscale_(optimizer)
                found[f"{name}: norm {step}"] = str(pipe.clip_grad_norm_(0.5).item())  # no number equals itself if it is none
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                found[f"{name}: scale {step}"] = scaler.get_scale()
            found[f"{name}: state"] = {key: value.tolist() for key, value in pipe.state_dict().items()}

        half("first", 0)
        state = adaptra.TrainingState(pipe, optimizer)
        taken = copy.deepcopy((state.state_dict(), scaler.state_dict()))
        half("second", 3)
        state.load_state_dict(taken[0])
        scaler.load_state_dict(taken[1])
        half("again", 3)
        found["hooked"] = hooked
        for key in [key for key in found if key.startswith("again")]:
            assert found[key] == found[key.replace("again", "second")], key
    return found


def train_each(rank: int, jobs: Sequence[tuple[Training, Sequence[Program]]]) -> list[list[dict[str, Any]]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [[train_once(schedule) for schedule in ("1f1b", *programs)] for train_once, programs in jobs]


def test_routes_change_no_number() -> None:
    """Whoever computes the first, a middle or the last stage of a microbatch, with dropout and gradients of two steps."""
    check([(train, list(PATHS))])


def test_buffers_and_tied_weights_keep_the_order_of_their_replica() -> None:
    """Buffers of BatchNorm, shared by the replicas or each with its own, and a weight of both the first and the last stage.

    Losses of evaluations depend on the buffers.
    """
    mixed = partial(train, example="mixed")
    check([(mixed, [SHARES, "exchanged paths"]), (partial(mixed, broadcast_buffers=False), ["detours"])])


def test_the_delegate_carries_what_crosses_replicas() -> None:
    """Of all messages, or of those between the first two stages, whichever workers have them."""
    mixed = partial(train, example="mixed")
    edges = partial(mixed, delegate=[(0, 1), (1, 0)])
    results = check([(partial(mixed, transport="delegate"), [SHARES, "detours"]), (edges, [SHARES, "detours"])])
    _, shares, detours = ({edge for one in results for edge in one[1][number]["delegated"]} for number in range(3))
    assert shares == {(0, 1), (1, 0), (3, 1), (1, 3), (3, 4), (4, 3)}
    assert detours == {(0, 1), (1, 0), (0, 4), (4, 0), (3, 4), (4, 3), (3, 1), (1, 3)}


def test_all_that_a_plain_step_has_holds_under_routes() -> None:
    """Recomputation, weighted and scaled losses, hooks, accumulation, clipping, and checkpoints."""
    for ((found, *_),) in check([(train_with_all, [SHARES, "exchanged paths"])]):
        assert found["first: scale 0"] < 2.0**126 < found["first: scale 2"] * 4, "one step was skipped, and others were not"
        assert found["hooked"], "hooks have run"


def test_sums_that_begin_while_w_runs_change_no_number() -> None:
    """In buckets of a layer, without routes and with them, beside tied weights, hooks and weighted losses."""
    gpt = partial(train, reduce=adaptra.Reduce(bucket=16384))
    mixed = partial(train, example="mixed", reduce=adaptra.Reduce(bucket=256))
    jobs = [(gpt, [SHARES, "detours"]), (mixed, [SHARES]), (partial(train_with_all, bucket=16384), [SHARES])]
    whole = run_processes(train_each, 6, [(train, []), (partial(train, example="mixed"), []), (train_with_all, [])])
    for of_rank, expected in zip(check(jobs), whole, strict=True):
        assert [found[0] for found in of_rank] == [found[0] for found in expected]


def check(jobs: Sequence[tuple[Training, Sequence[str]]]) -> list[list[list[dict[str, Any]]]]:
    """Compare jobs with these routes with the same ones without, rank by rank."""
    given = [(train_once, [routed(PATHS[name]) for name in names]) for train_once, names in jobs]
    results = run_processes(train_each, 6, given)
    for rank, of_jobs in enumerate(results):
        for (train_once, names), (expected, *found) in zip(jobs, of_jobs, strict=True):
            for name, one in zip(names, found, strict=True):
                assert {**one, "delegated": None} == {**expected, "delegated": None}, f"{name}, {train_once}, rank {rank}"
    return results
