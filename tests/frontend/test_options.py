"""What the options of a pipeline change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import EXAMPLES

import adaptra
from adaptra.errors import TransportError
from adaptra.program import Program
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.simulation.simulate import simulate

ROWS, MICROBATCHES, STAGES = 16, 8, 4
ONSET = 12
"""A step after enough others that one that a busy machine held up says little about how much steps scatter."""

SLOW = [f"delay 1-2 40ms @{ONSET}"]
DEVICE = adaptra.EmulatedDevice(0.005, 0.005, 0.005)


MOST = 100
"""Steps within which a slow link is found, however busy the machine."""


def train(
    steps: int, name: str = "skip_mlp", until: Callable[[adaptra.Pipeline], bool] | None = None, **options: Any
) -> tuple[adaptra.Pipeline, list[torch.Tensor]]:
    """A pipeline after some steps or once ``until`` holds, closed, and the microbatches' losses."""
    example = EXAMPLES[name]
    args, _, targets = example.rows(ROWS, seed=0)
    losses: list[torch.Tensor] = []
    with adaptra.compile(
        example.make(),
        stages=STAGES,
        microbatches=MICROBATCHES,
        example_inputs=(args, targets),
        loss=example.loss,
        options=adaptra.Options(**options),
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
        for step in range(steps):
            args, _, targets = example.rows(ROWS, seed=step)
            pipe.step(args, targets)
            losses.append(pipe.microbatch_losses)
            optimizer.step()
            optimizer.zero_grad()
            if until is not None and until(pipe):
                break
    return pipe, losses


@pytest.mark.parametrize("planning_seconds", [0.1, 1e-9])
def test_a_slow_link_is_detected_and_adapted_to(planning_seconds: float) -> None:
    """The plan changes, everyone is told, and not one bit of the training does, however short the search for a plan is."""

    told: list[ControlEvent] = []

    def expects_it(pipe: adaptra.Pipeline) -> bool:
        switched = {event.rank for event in told if event.kind is EventKind.SWITCHED}
        return {(1, 2), (2, 1)} <= set(pipe.slow_edges) and switched == set(range(STAGES))

    pipe, losses = train(
        MOST, until=expects_it, on_event=told.append, faults=SLOW, emulate=DEVICE, planning_seconds=planning_seconds
    )
    kinds = {event.kind for event in told}
    assert {EventKind.DETECTED, EventKind.PROPOSED, EventKind.AGREED, EventKind.CONFIRMED, EventKind.SWITCHED} <= kinds
    assert pipe.plan.version >= 1
    assert expects_it(pipe)
    assert {event.rank for event in told if event.kind is EventKind.SWITCHED} == set(range(STAGES))
    assert set(pipe.events) <= set(told)
    _, undisturbed = train(len(losses))
    assert all(map(torch.equal, losses, undisturbed))


def test_without_adapting_a_slow_link_is_reported_and_the_plan_stays() -> None:
    told: list[ControlEvent] = []

    def is_told(pipe: adaptra.Pipeline) -> bool:
        return any(event.kind is EventKind.KEPT and event.step >= ONSET for event in told)

    pipe, _ = train(MOST, until=is_told, adapt=False, faults=SLOW, emulate=DEVICE, on_event=told.append)
    kinds = {event.kind for event in told}
    assert pipe.plan.version == 0
    assert EventKind.DETECTED in kinds and EventKind.KEPT in kinds
    assert not kinds & {EventKind.PROPOSED, EventKind.AGREED, EventKind.SWITCHED}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_the_first_plan_is_the_schedule_asked_for(schedule: str) -> None:
    pipe, losses = train(2, schedule=schedule)
    assert pipe.plan.program == adaptra.generate(schedule, STAGES, MICROBATCHES)
    _, adapted = train(2)
    assert all(map(torch.equal, losses, adapted))


def test_the_first_plan_may_be_a_program_of_ones_own() -> None:
    program = adaptra.generate("gpipe", STAGES, MICROBATCHES)
    mine = Program.of_pipeline("mine", program.placement, program.microbatches, program.orders)
    pipe, _ = train(1, schedule=mine)
    assert pipe.plan.program == mine and "mine, as asked for" in pipe.plan.reason


def first_plan(memory: int | None = None, **options: Any) -> Plan:
    """Of a pipeline whose stages all take as long."""
    example = EXAMPLES["skip_mlp"]
    args, _, targets = example.rows(2 * 16, seed=0)
    with adaptra.compile(
        example.make(),
        stages=STAGES,
        microbatches=16,
        memory=memory,
        example_inputs=(args, targets),
        loss=example.loss,
        options=adaptra.Options(emulate=DEVICE, **options),
    ) as pipe:
        return pipe.plan


def in_flight(plan: Plan) -> tuple[int, ...]:
    return simulate(plan.program, plan.case.cost).peak_in_flight


def test_the_first_plan_spreads_spare_memory_as_slack_and_costs_nothing_for_it() -> None:
    spread, needed = first_plan(memory=10), first_plan()
    assert in_flight(spread) == (10, 7, 4, 1) and in_flight(needed)[0] < 10
    assert spread.predicted == needed.predicted
    assert spread.reason == "adapted to the estimated costs, spare memory spread as slack"


def test_without_memory_to_spare_the_first_plan_is_the_shortest() -> None:
    assert first_plan(memory=3).reason == "adapted to the estimated costs"


def test_the_first_plan_has_its_slack_where_delays_are_expected() -> None:
    plan = first_plan(memory=10, expected_delays={(1, 2): {0.0: 1, 0.02: 1}, (2, 1): {0.0: 1, 0.02: 1}})
    late = plan.case.cost.with_latency(1, 2, 0.02).with_latency(2, 1, 0.02)
    assert simulate(plan.program, late).makespan < simulate(first_plan(memory=10).program, late).makespan
    assert plan.reason == "good on average over the delays to expect, for the estimated costs"


def test_the_seed_decides_the_random_numbers_and_nothing_else_does() -> None:
    _, first = train(2, "gpt_dropout", seed=1)
    _, again = train(2, "gpt_dropout", seed=1, schedule="gpipe")
    _, other = train(2, "gpt_dropout", seed=2)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    assert not torch.equal(first[0][0], first[0][1])


def test_a_message_is_waited_for_as_long_as_asked() -> None:
    """Every stage waits for the slow edge in the end: whichever gives up first names the message that it waited for."""
    with pytest.raises(TransportError, match=r"of step 1 on edge [0-3]→[0-3] .*not exchanged within 0\.3 s"):
        train(2, faults=["delay 0>1 5s @1"], timeout=0.3)
