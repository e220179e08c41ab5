"""Healthy jobs on a host whose other processes come and go: what they slowed for a while is believed for as long only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from job_world import COST, job_world, measured, slow
from policy_world import PolicyWorld

from adaptra.runtime.detection.changes import LossChange
from adaptra.runtime.detection.detector import Detector
from adaptra.runtime.measuring.measurement import Stalls, StepMeasurement

SLOW_WORKER = 1, 1
"""Its replica and its stage."""


def run(world: PolicyWorld, first: int, factors: Sequence[float], noise: random.Random) -> list[bool]:
    """Steps in which one worker takes so many times as long; whether each ran with microbatches away from home."""
    replica, stage = SLOW_WORKER
    found: list[bool] = []
    for step, factor in enumerate(factors, start=first):
        routing = world.plan.program.routing
        found.append(world.plan.is_routed)
        world.step(measured(step, {replica: slow(stage, factor)}, noise, routing))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_share_is_undone_when_its_worker_is_as_fast_as_before(seed: int) -> None:
    """Also where steps scattered so much while it was slow that one normal step seems to be a part of that."""
    noise, world = random.Random(seed), job_world()
    run(world, 0, [1.0] * 20, noise)
    busy = run(world, 20, [noise.choice((1.0, 2.0, 4.0, 7.0)) for _ in range(10)] + [3.0, 3.0, 3.0, 8.0, 1.5, 3.0], noise)
    assert any(busy)
    after = run(world, 36, [1.0] * 40, noise)
    assert not any(after[20:])


@pytest.mark.parametrize("seed", [1, 3])
def test_no_share_lasts_on_a_host_with_processes_that_come_and_go(seed: int) -> None:
    """Up to eight of them, each time for a minute. Steps without any behind them must not run a share for long."""
    dice, world = random.Random(seed), job_world()
    lasting = longest = busy = 0
    for step in range(1500):
        if step % 100 == 0:
            busy = dice.choice((0, 0, 1, 2, 4, 8))
        factor = 1.0 + (dice.random() < busy / 16) * dice.expovariate(1 / (0.5 * busy)) if busy else 1.0
        routing = world.plan.program.routing
        lasting = lasting + 1 if world.plan.is_routed and busy == 0 else 0
        longest = max(longest, lasting)
        replica, stage = SLOW_WORKER
        world.step(measured(step, {replica: slow(stage, factor)}, dice, routing))
    assert longest <= 24


def lossy(step: int, stalls: Stalls, pause: float = 0.0) -> list[StepMeasurement]:
    """A step of the job in which messages of each edge stall."""
    return [
        replace(
            one,
            pause=pause,
            edges=tuple(replace(edge, stalls=stalls) for edge in one.edges),
        )
        for one in measured_of_one(step)
    ]


def measured_of_one(step: int) -> list[StepMeasurement]:
    return [one for one in measured(step) if one.rank < 3]


LATE = Stalls(1, 1, 0.34)


def losses(pauses: Sequence[float], stalled: Sequence[int], steps: int = 40) -> list[int]:
    """The steps that called an edge lossy, where messages stall in some steps and ranks pause in others."""
    detector = Detector(COST)
    found: list[int] = []
    for step in range(steps):
        stalls = LATE if step in stalled else Stalls()
        detection = detector.observe(lossy(step, stalls, pauses[step % len(pauses)]))
        if detection is not None and any(isinstance(one, LossChange) and not one.is_healed for one in detection.changes):
            found.append(step)
    return found


def test_stalls_of_the_first_steps_alone_make_no_edge_lossy() -> None:
    assert losses([0.0], range(7)) == []
    assert losses([0.0], range(20)) != []


def test_stalls_are_no_losses_where_ranks_pause_as_often_for_as_long() -> None:
    """The pause that explains a stall may be of another step, as records of both end with their step."""
    assert losses([0.0, 0.4], range(12, 40, 2)) == []
    assert losses([0.0], range(12, 40, 2)) != []


def test_calibration_takes_more_steps_while_steps_scatter() -> None:
    """Three steps of a busy host tell nothing. It ends when the latest ones agree, or after four times as many."""
    detector = Detector(COST)
    factors = [1.0, 1.0, 2.2, 3.5, 1.8, 2.6, 1.0, 1.0, 1.0, 1.0]
    calibrated = [step for step, factor in enumerate(factors) if detector.observe(one_slow(step, factor)) is not None]
    assert calibrated == [9]
    assert detector.cost.forward[1] == pytest.approx(COST.forward[1])
    never = Detector(COST)
    (end,) = [step for step in range(20) if never.observe(one_slow(step, 1.0 + step % 3)) is not None]
    assert end == 12


def one_slow(step: int, factor: float) -> list[StepMeasurement]:
    """A step of one replica whose middle stage takes so many times as long."""
    return [one for one in measured(step, {0: slow(1, factor)}) if one.rank < 3]


def test_a_plan_waits_no_longer_than_steps_scatter() -> None:
    """They did so before its detection, and that is remembered for long."""
    dice, world = random.Random(0), job_world()
    away: list[int] = []
    for step in range(100):
        seconds = dice.choice((0.4, 0.9, 1.5)) if step < 40 else 0.7
        found = measured(step, {1: slow(1, 1.5)} if step >= 40 else None, dice, world.plan.program.routing)
        world.step([replace(one, seconds=seconds) for one in found])
        if world.plan.is_routed:
            away.append(step)
    assert away and away[0] < 55
