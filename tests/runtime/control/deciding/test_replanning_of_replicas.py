"""Tests of the plans of a job: who computes what while a worker is slow, and that all goes home when it is not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from job_world import CASE, COST, REPLICAS, STAGES, job_world, measured, plan_zero, slow

from adaptra.errors import ControlError, PlanError, ScheduleError
from adaptra.planning.remedies.job_remedies import JobRemedy
from adaptra.planning.routes.joined_programs import join
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.program import Program
from adaptra.runtime.control.agreement.preparation import Preparation
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.control.mail.mail import Proposed
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.detection.detector import Detection
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

ONSET, HEALED = 10, 20


def through(costs: CostModel, steps: int = 32) -> list[Plan]:
    """The plan of each step, while the second replica has these costs from the onset to the recovery."""
    world = job_world()
    plans = [world.plan]
    for step in range(steps):
        plans.append(world.step(measured(step, {1: costs} if ONSET <= step < HEALED else None)))
    return plans


def test_a_slow_worker_gives_microbatches_away_and_gets_them_back() -> None:
    plans = through(slow(1, 2.0))
    before, during, after = plans[ONSET], plans[ONSET + 3], plans[HEALED + 5]
    assert not before.is_routed and before.program.is_one_pipeline
    assert during.is_routed and during.remedy is JobRemedy.SHARE
    routing = during.program.routing
    away = [(r, s, m) for r in range(2) for s in range(3) for m in range(4) if routing.holder(r, s, m) != 3 * r + s]
    assert away and all((replica, stage) == (1, 1) for replica, stage, _ in away)
    assert "worker 1.1 slow" in during.reason and "share" in during.reason and "keep" in during.reason
    assert during.predicted < 0.85 * 2 * before.predicted
    assert not after.is_routed and after.program == before.program


def test_plans_of_a_late_link_are_those_of_both_replicas() -> None:
    during = through(COST.with_latency(0, 1, 0.1).with_latency(1, 0, 0.1))[ONSET + 3]
    assert not during.program.is_one_pipeline and during.case.cost.latency(0, 1) == 0.1
    assert during.remedy in (JobRemedy.REORDER, JobRemedy.DETOUR) and "replica 1" in during.reason


def test_microbatches_come_back_from_a_detour_once_the_link_is_no_longer_late() -> None:
    """No message takes the link meanwhile, but its probes are late and then are not."""
    late = COST.with_latency(0, 1, 0.3).with_latency(1, 0, 0.3)
    world = job_world()
    routed: list[bool] = []
    for step in range(40):
        routing = world.plan.program.routing
        world.step(measured(step, {1: late} if ONSET <= step < HEALED else None, routing=routing))
        routed.append(world.plan.is_routed)
    assert all(routed[ONSET + 3 : HEALED]) and not any(routed[HEALED + 5 :])


def test_a_probe_does_not_tell_that_a_link_is_wide_again() -> None:
    """A few bytes are as fast over a narrow link, so microbatches stay where they are until something else is known."""
    narrow = COST.with_occupancy(0, 1, 0.3).with_occupancy(1, 0, 0.3)
    world = job_world()
    for step in range(60):
        world.step(measured(step, {1: narrow} if step >= ONSET else None, routing=world.plan.program.routing))
    assert world.plan.is_routed
    assert len([event for event in world.events(EventKind.DETECTED) if event.step > ONSET + 3]) == 0


def test_microbatches_come_back_from_a_detour_once_rate_probes_tell_that_a_link_is_wide_again() -> None:
    """As often as they are sent: in one of eight steps, and in each one after the first of another rate."""
    narrow = COST.with_occupancy(0, 1, 0.3).with_occupancy(1, 0, 0.3)
    world = job_world()
    rates = (ONSET + 3, HEALED - 1, HEALED + 7, HEALED + 8, HEALED + 9)
    routed: list[bool] = []
    for step in range(HEALED + 15):
        routing, costs = world.plan.program.routing, {1: narrow} if ONSET <= step < HEALED else None
        world.step(measured(step, costs, routing=routing, has_rates=step in rates))
        routed.append(world.plan.is_routed)
    assert all(routed[ONSET + 3 : HEALED + 7]) and not any(routed[HEALED + 9 :])
    healed = [one for one in world.events(EventKind.DETECTED) if one.step > ONSET + 3]
    assert healed and all("of replica 1 healed" in one.text for one in healed)


def test_a_job_that_only_scatters_is_not_shared() -> None:
    noise, world = random.Random(3), job_world()
    for step in range(1500):
        world.step(measured(step, None, noise))
    assert not [event for event in world.events(EventKind.PROPOSED) if "microbatches of worker" in event.text]


def test_a_plan_has_room_for_what_runs() -> None:
    """Whole microbatches may exceed a limit in bytes that the running program keeps: it stays, and nothing holds more."""
    planning = Planning(lambda _case, program: program, replicas=REPLICAS)
    tight = replace(CASE, cost=COST.limited((1.0,) * STAGES))
    current = replace(plan_zero(), case=tight)
    costs = (COST, slow(1, 2.0))
    plan, _ = planning.plan_for(Detection(9, (), costs[1], by_replica=costs), current, (), is_draft=False)
    held = [max(simulate(one, CASE.of_replicas(REPLICAS)).held) for one in (join([current.program] * 2), plan.program)]
    assert plan.remedy is JobRemedy.SHARE and held[1] <= held[0]


def test_measured_updates_are_in_the_period_of_one_pipeline_and_of_several() -> None:
    updated = replace(COST, update=(0.0, 0.3, 0.0))
    detected = Detection(9, (), updated, by_replica=(updated, updated))
    program, load = plan_zero().program, 4 * 0.12
    for replicas in (1, REPLICAS):
        planning = Planning(lambda case, program: PERIOD.plan(case, incumbent=program), replicas=replicas)
        plan, _ = planning.plan_for(detected, plan_zero(), (), is_draft=False)
        assert plan.predicted == planning.expect(plan.program, detected) <= planning.expect(program, detected)
        assert load + 0.3 <= plan.bound * (1 + 1e-9) <= plan.predicted * (1 + 2e-9) and plan.predicted < load + 0.35
        assert Plan.from_json(plan.to_json()).case.cost.update == (0.0, 0.3, 0.0)


def test_edges_take_the_delegate_until_those_of_all_replicas_have_recovered() -> None:
    planning = Planning(lambda _case, program: program, replicas=REPLICAS)
    late = COST.with_latency(0, 1, 0.3)
    current = replace(plan_zero(), delegated=((0, 1),))
    for costs, expected in (((COST, late), ((0, 1),)), ((COST, COST), ())):
        found, _ = planning.plan_for(Detection(9, (), late, by_replica=costs), current, (), is_draft=False)
        assert found.delegated == expected


def test_edges_take_the_delegate_unless_all_go_round_them() -> None:
    planning = Planning(lambda _case, program: program, replicas=REPLICAS)
    late = COST.with_latency(0, 1, 0.3).with_latency(1, 0, 0.3)
    edges = (0, 1), (1, 0)
    for costs, at_home, remedy, expected in (
        ((COST, late), set[int](), JobRemedy.DETOUR, ()),
        ((COST, late), set(range(STAGES)), JobRemedy.REORDER, edges),
        ((late, late), set[int](), JobRemedy.REORDER, edges),
    ):
        detected = Detection(9, (), late, by_replica=costs)
        found, _ = replace(planning, at_home=frozenset(at_home)).plan_for(detected, plan_zero(), edges, is_draft=False)
        assert (found.remedy, found.delegated) == (remedy, expected)
        assert ("; edges that take the delegate: 0→1, 1→0; keep " in found.reason) == bool(expected)


CROSSED = """
schedule crossed version=2 stages=3 microbatches=2
workers 0,1,2 3,4,5
route 0 0 by 3,1,2
route 0 1 by 0,1,2
route 1 0 by 0,4,5
route 1 1 by 3,4,5
0: 0:0F1 1:0F0 1:0I0 1:0W0 0:0I1 0:0W1
1: 0:1F0 0:1F1 0:1I0 0:1W0 0:1I1 0:1W1
2: 0:2F0 0:2F1 0:2I0 0:2W0 0:2I1 0:2W1
3: 1:0F1 0:0F0 0:0I0 0:0W0 1:0I1 1:0W1
4: 1:1F0 1:1F1 1:1I0 1:1W0 1:1I1 1:1W1
5: 1:2F0 1:2F1 1:2I0 1:2W0 1:2I1 1:2W1
"""
"""Each first worker waits for buffers that the other one changes later."""


def test_a_plan_that_does_not_suit_the_stages_is_refused() -> None:
    planning = Planning(lambda _case, program: program, replicas=REPLICAS)
    crossed = Program.parse(CROSSED)
    planning.check(crossed)
    with pytest.raises(ScheduleError, match=r"^crossed: deadlock: "):
        replace(planning, changing=frozenset({0})).check(crossed)
    with pytest.raises(PlanError, match=r"^microbatch 0 of replica 0 leaves stage 0: expected it to stay at home$"):
        replace(planning, at_home=frozenset({0})).check(crossed)
    replace(planning, changing=frozenset({1}), at_home=frozenset({2})).check(crossed)


def test_a_plan_keeps_its_remedy_as_json() -> None:
    plan = through(slow(1, 2.0))[ONSET + 3]
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ControlError, match="remedy"):
        Plan.from_json(plan.to_json() | {"remedy": "pray"})


def test_a_plan_of_other_workers_is_refused() -> None:
    routed, refused, ready = through(slow(1, 2.0))[ONSET + 3], list[str](), list[Plan]()
    planning = Planning(lambda _case, program: program, replicas=REPLICAS)
    for workers in (planning.workers(plan_zero().case), ((0, 1, 2),)):
        preparation = Preparation(
            0,
            plan_zero().program,
            workers,
            planning.check,
            None,
            ready.append,
            lambda _version, why: refused.append(why),
        )
        preparation.begin(Proposed(routed.version, routed.to_json()))
        preparation.close(10)
    assert ready == [routed]
    what = f"plan {routed.version} has workers ((0, 1, 2), (3, 4, 5)) and 4 microbatches"
    assert refused == [f"{what}: expected ((0, 1, 2),) and 4"]
