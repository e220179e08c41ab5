"""A rank refuses a plan that its memory does not allow, and all ranks keep the old one; few plans are kept ready."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from training import MIXED, adam, compiled, differences, run_step, train_alone

import adaptra
from adaptra.frontend.planned import stage_planning
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.worker.step.rank_programs import MOST_PREPARED, RankPrograms

STEPS = 40
"""Far more than calibration, detection and a proposal take."""


@pytest.mark.timed
def test_a_plan_beyond_the_memory_is_refused_and_nobody_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = stage_planning._better_plan

    def careless(seconds: float, share: float, case: adaptra.Case, incumbent: adaptra.Program) -> adaptra.Program:
        return planner(seconds, share, replace(case, cost=replace(case.cost, memory_limit=None)), incumbent)

    monkeypatch.setattr(stage_planning, "_better_plan", careless)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)
    refused: list[str] = []

    def listen(event: Any) -> None:
        if event.kind is EventKind.REFUSED:
            refused.append(event.text)

    options = adaptra.Options(
        emulate=adaptra.EmulatedDevice(0.004, 0.004, 0.004), faults=["delay 0-1 20ms @4"], on_event=listen
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    problem: dict[str, Any] = {"stages": 2, "microbatches": 8, "example_inputs": (inputs, targets), "loss": functional.mse_loss}
    with adaptra.compile(model, **problem, memory=2, options=options) as pipe:
        for _ in range(STEPS):
            pipe.step(inputs, targets)
            if refused:
                break
        assert refused, "the careless planner's plan was never proposed"
        assert ": expected at most 2 microbatches, as memory= allows" in refused[0]
        for _ in range(4):
            pipe.step(inputs, targets)
        assert pipe.plan.version == 0
        assert not any(event.kind is EventKind.SWITCHED for event in pipe.events)


@pytest.mark.timed
def test_few_plans_are_kept_ready_and_any_other_is_lowered_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when many suspicions came to nothing: here every rank forgets at once what it has prepared."""
    prepare, kept = RankPrograms.prepare, list[int]()

    def forgetful(programs: RankPrograms, plan: Plan) -> None:
        for version in range(plan.version + 1, plan.version + 10):
            prepare(programs, replace(plan, version=version))
        kept.append(len(programs._prepared))
        programs._prepared.clear()

    monkeypatch.setattr(RankPrograms, "prepare", forgetful)
    options = adaptra.Options(emulate=adaptra.EmulatedDevice(0.003, 0.003, 0.003), faults=["delay 1-2 40ms @5"])
    batches = [MIXED.rows(16, step) for step in range(STEPS)]
    with compiled(MIXED, batches[0], stages=3, microbatches=8, options=options) as pipe:
        optimizer, ran = adam(pipe.parameters()), []
        for batch in batches:
            ran.append(run_step(pipe, optimizer, batch))
            if pipe.plan.version > 0:
                break
    assert pipe.plan.version > 0, "a plan for the slow link runs"
    assert max(kept) == MOST_PREPARED
    assert differences(ran, train_alone(MIXED, batches[: len(ran)], 8)) == []
