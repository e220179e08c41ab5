"""Clipping makes all ranks meet between steps: from then on the plan is one of the shortest makespan, and says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes

import adaptra
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.runtime.control.plans.events import EventKind
from adaptra.simulation.simulate import lower_bound, simulate

BATCH = torch.randn(16, 8), torch.randn(16, 8)


def compiled(stages: int = 4, **given: Any) -> adaptra.Pipeline:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(4)))
    emulate = adaptra.EmulatedDevice(0.002, 0.002, 0.002)
    return adaptra.compile(
        model,
        stages=stages,
        microbatches=8,
        example_inputs=BATCH,
        loss=torch.nn.functional.mse_loss,
        options=adaptra.Options(emulate=emulate),
        **given,
    )


@pytest.mark.timed
@pytest.mark.parametrize("way", ["clipping", "scaling"])
def test_steps_behind_a_barrier_are_planned_for_by_their_makespan(way: str) -> None:
    with compiled() as pipe:
        first = pipe.plan
        assert not first.case.barrier and first.predicted == PERIOD.of(first.program, first.case.cost)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
        scaler = pipe.grad_scaler(enabled=way == "scaling")
        for _ in range(40):
            pipe.step(*BATCH)
            if way == "clipping":
                pipe.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if pipe.plan.case.barrier:
                break
        plan = pipe.plan
        assert plan.case.barrier and plan.predicted == simulate(plan.program, plan.case.cost).makespan
        assert plan.bound == lower_bound(plan.case).value
        assert any("all ranks meet between steps" in event.text for event in pipe.events if event.kind is EventKind.DETECTED)


@pytest.mark.timed
def test_steps_in_a_row_are_planned_for_by_their_period() -> None:
    with compiled() as pipe:
        for _ in range(10):
            pipe.step(*BATCH)
        assert not pipe.plan.case.barrier and not any("meet" in event.text for event in pipe.events)


def meet_by_oneself(rank: int, way: str) -> tuple[bool, list[str]]:
    """Train while the user's code has all ranks meet between steps, or one of them alone, or none; what the plan says of it."""
    dist.init_process_group("gloo")
    alone = dist.new_group([0])
    with compiled(2, transport="c10d") as pipe:
        for _ in range(20):
            loss = pipe.step(*BATCH)
            if way == "all":
                dist.all_reduce(loss)
            elif way == "alone" and rank == 0:
                dist.all_reduce(loss, group=alone)
            if pipe.plan.case.barrier:
                break
        texts = [event.text for event in pipe.events if event.kind is EventKind.DETECTED]
        found = pipe.plan.case.barrier, texts
        dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.timed
@pytest.mark.processes
@pytest.mark.parametrize("way", ["all", "alone", "nobody"])
def test_a_meeting_that_the_users_code_calls_is_seen(way: str) -> None:
    for has_barrier, texts in run_processes(meet_by_oneself, 2, way):
        assert has_barrier == (way == "all")
        assert any("all ranks meet between steps" in text for text in texts) <= has_barrier
