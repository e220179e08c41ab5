"""Events come in the order of what happened, and stay when cuts move; a saved step shows its slow edge."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from protocol_world import ModelPlan
from torch import Tensor
from training import MIXED

import adaptra
from adaptra.runtime.control.agreement.participant import Participant, Surroundings
from adaptra.runtime.control.mail.mail import Measured, Proposed
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.measuring.measurement import StepMeasurement

ROWS = 16


def pipeline(**arguments: Any) -> tuple[adaptra.Pipeline, tuple[Tensor, Tensor]]:
    inputs, _, targets = MIXED.rows(ROWS, seed=0)
    return adaptra.compile(
        MIXED.make(), stages=2, microbatches=4, example_inputs=(inputs, targets), loss=MIXED.loss, **arguments
    ), (inputs[0], targets)


def test_events_stay_when_the_cut_moves() -> None:
    pipe, batch = pipeline(split=["middle.1"])
    with pipe:
        optimizer = torch.optim.SGD(pipe.parameters())
        pipe.step(*batch)
        assert pipe._session is not None
        pipe._session.workers[0].controller.recorder.emit_now(EventKind.LINK, "a port went down")
        for split in (["middle.4"], ["middle.1"]):
            before = pipe.events
            pipe.take_split(split, optimizer)
            pipe.step(*batch)
            assert pipe.events[: len(before)] == before
        assert EventKind.LINK in [event.kind for event in pipe.events]


@pytest.mark.timed
@pytest.mark.parametrize("suffix", ["json", "svg"])
def test_a_saved_step_shows_its_slow_edge(tmp_path: Path, suffix: str) -> None:
    """Also where nothing adapts, so that no plan knows of it."""
    options = adaptra.Options(adapt=False, faults=["delay 0>1 150ms"], emulate=adaptra.EmulatedDevice(0.01, 0.01, 0.01))
    pipe, batch = pipeline(options=options)
    with pipe:
        pipe.step(*batch)
        pipe.save_trace(tmp_path / f"step.{suffix}")
    text = (tmp_path / f"step.{suffix}").read_text()
    if suffix == "svg":
        assert "message on a slow edge" in text
    else:
        names = {event["args"]["name"] for event in json.loads(text)["traceEvents"] if event["ph"] == "M"}
        assert "stage 0 → 1, slow" in names and "stage 1 → 0" in names


def test_an_agreement_is_told_before_any_step_can_run_under_it() -> None:
    """One rank, whose mail is handled in order: training goes on as soon as the log covers a step."""
    told, mail = [], []
    initial: Any = ModelPlan(0, "initial")
    other: Any = ModelPlan(1, "other")

    def consider(proposed: Proposed) -> None:
        plan: Any = proposed.plan
        participant.ready(plan)

    around = Surroundings(
        dist.HashStore(),
        lambda _, one: mail.append(one),
        lambda until, plan: told.append(("covered", plan.version)),
        consider,
        lambda leads: None,
        lambda event: told.append((event.kind, event.version)),
    )
    participant = Participant(0, 1, initial, around, 2, 0)

    def settle() -> None:
        while mail:
            participant.handle(mail.pop(0))

    participant.start()
    settle()
    participant.propose(other, None, "better")
    settle()
    participant.handle(Measured(StepMeasurement(0, 0, 0.0, (), ())))
    settle()
    assert told.index((EventKind.AGREED, 1)) < told.index(("covered", 1)), told
