"""The policy, stepped through slow and flapping edges: what it plans for and proposes, and what it withdraws."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest
from controller_world import HEALTHY, RANKS, SLOW, SLOW_PROGRAM, best, measurement, plan_zero
from policy_world import SECONDS, PolicyWorld

from adaptra.errors import PlanError
from adaptra.program import Program
from adaptra.runtime.control.deciding.policy import BeginPlanning, ControllerOptions, Propose, Release, Withdraw
from adaptra.runtime.control.deciding.replanning import Planning, step_seconds
from adaptra.runtime.control.plans.events import EventKind
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

PLANNING = Planning(best)

Kind = TypeVar("Kind")

CALIBRATED = 4
"""Steps until the levels are known: one of warm-up and three of calibration."""


class Run:
    """A world whose steps follow from the costs; remembers the plan of every step."""

    def __init__(self, world: PolicyWorld) -> None:
        self.world = world
        self.versions = [world.plan.version]

    def steps(self, count: int, cost: CostModel, seconds: float = SECONDS, *, has_met: bool = False) -> None:
        for _ in range(count):
            step = len(self.versions) - 1
            measured = [measurement(rank, step, cost) for rank in range(RANKS)]
            plan = self.world.step([replace(one, seconds=seconds, has_met=has_met) for one in measured])
            self.versions.append(plan.version)

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [action for action in self.world.actions if isinstance(action, kind)]


def calibrated(world: PolicyWorld | None = None) -> Run:
    """A run that has detected nothing but its calibration, with no actions remembered."""
    run = Run(world or PolicyWorld(plan_zero(), RANKS, PLANNING))
    run.steps(CALIBRATED + 2, HEALTHY)
    run.world.actions.clear()
    return run


def test_healthy_steps_plan_once_and_propose_nothing() -> None:
    run = Run(PolicyWorld(plan_zero(), RANKS, PLANNING))
    run.steps(50, HEALTHY)
    (begun,) = run.of(BeginPlanning)
    assert begun.detection.reason == "calibrated by measurement" and not begun.is_draft
    assert [event.kind for event in run.world.events(*EventKind)] == [EventKind.DETECTED, EventKind.KEPT]
    assert set(run.versions) == {0}


def test_a_slow_edge_is_drafted_for_in_its_first_step_and_released_in_its_second() -> None:
    run = calibrated()
    onset = len(run.versions) - 1
    run.steps(1, SLOW)
    assert [type(action) for action in run.world.actions] == [BeginPlanning, Propose]
    assert run.of(BeginPlanning)[0].is_draft and run.of(Propose)[0].is_speculative
    assert run.versions[-1] == 0, "all ranks are ready, and go on under the old plan"
    run.steps(1, SLOW)
    assert run.of(Release) and not run.of(Withdraw)
    assert run.versions[onset:] == [0, 0, 1], "the step after the detection runs the plan"
    assert run.world.plan.program == SLOW_PROGRAM
    (detected,) = run.world.events(EventKind.DETECTED)
    assert (detected.step, detected.version) == (onset + 1, 0)
    assert sorted(detected.text.split("; ")) == [
        "edge 1→2 slow: 60.0 ms (was 0.2 ms)",
        "edge 2→1 slow: 60.0 ms (was 0.2 ms)",
    ]
    run.steps(30, SLOW)
    assert set(run.versions[onset + 2 :]) == {1}, "nothing better is found for the detected costs"


def test_a_suspicion_that_the_next_step_refutes_is_withdrawn() -> None:
    run = calibrated()
    run.steps(1, SLOW)
    run.steps(1, HEALTHY)
    (withdrawn,) = run.of(Withdraw)
    assert withdrawn.why == "what was suspected did not come true" and not run.of(Release)
    run.steps(20, HEALTHY)
    assert set(run.versions) == {0} and run.world.agreement.proposal is None
    assert not run.world.events(EventKind.DETECTED)


def test_a_suspicion_that_came_true_is_not_called_untrue_where_its_plan_no_longer_suits() -> None:
    run = calibrated()
    run.steps(1, SLOW)
    policy = run.world.policy
    policy._wins = lambda *_: False  # type: ignore[method-assign]
    run.steps(1, SLOW)
    (withdrawn,), (detected,) = run.of(Withdraw), run.world.events(EventKind.DETECTED)
    assert withdrawn.why == f"step {detected.step} shows what this plan no longer suits: {detected.text}"


def test_a_plan_that_takes_steps_to_make_is_proposed_for_what_was_detected_meanwhile() -> None:
    """The draft of the first slow step is there after the detection: it need not wait for another planning."""
    run = calibrated(PolicyWorld(plan_zero(), RANKS, PLANNING, planning_steps=1))
    run.steps(1, HEALTHY)  # the calibration's planning ends
    run.world.actions.clear()
    run.steps(4, SLOW)
    begun, proposed = run.of(BeginPlanning), run.of(Propose)
    assert [one.is_draft for one in begun] == [True, False], "one planning at a time"
    assert proposed[0].is_speculative and run.of(Release)
    assert run.world.plan.program == SLOW_PROGRAM


def test_an_outcome_is_dropped_if_something_else_was_detected_meanwhile() -> None:
    """Planning takes eight steps, in which the edge turns slow and recovers."""
    run = calibrated(PolicyWorld(plan_zero(), RANKS, PLANNING, planning_steps=8))
    run.steps(8, HEALTHY)
    run.world.actions.clear()
    run.steps(3, SLOW)
    run.steps(20, HEALTHY)
    assert len(run.world.events(EventKind.DETECTED)) == 2
    assert not run.of(Propose) and set(run.versions) == {0}


def test_the_plan_for_the_recovery_of_a_flapping_edge_waits_longer_after_each_relapse() -> None:
    run = calibrated()
    onset, recoveries = len(run.versions) - 1, list[int]()
    for _ in range(3):
        run.steps(6, SLOW)
        recoveries.append(len(run.versions) - 1)
        run.steps(12, HEALTHY)
    switches = [step for step in range(onset, len(run.versions)) if run.versions[step] != run.versions[step - 1]]
    slow, back = switches[::2], switches[1::2]
    assert [step - onset for step in slow] == [2, 20, 38], "a slowdown is acted on at once, however often it came before"
    assert [step - recovered for step, recovered in zip(back, recoveries, strict=True)] == [2, 5, 7]
    said = [event.text for event in run.world.events(EventKind.KEPT) if event.text.startswith("a flapping")]
    assert [text.partition("waits until ")[2] for text in said] == [
        f"{hold_off} steps after step {recovered + 1}" for hold_off, recovered in zip((2, 4), recoveries[1:], strict=True)
    ]


def test_a_relapse_within_the_hold_off_costs_no_switch() -> None:
    run = calibrated()
    for _ in range(2):
        run.steps(6, SLOW)
        run.steps(6, HEALTHY)
    run.steps(6, SLOW)
    version = run.world.plan.version
    for _ in range(4):
        run.steps(3, HEALTHY)
        run.steps(3, SLOW)
    assert run.world.plan.version == version and run.world.plan.program == SLOW_PROGRAM


def test_a_proposal_that_a_rank_does_not_confirm_is_withdrawn_in_time() -> None:
    options = ControllerOptions(confirm_seconds=3 * SECONDS)
    run = calibrated(PolicyWorld(plan_zero(), RANKS, PLANNING, options, confirming=range(RANKS - 1)))
    run.steps(8, SLOW)
    withdrawn = run.of(Withdraw)
    assert [one.why for one in withdrawn] == [f"not confirmed by rank {RANKS - 1} within {3 * SECONDS} s"]
    assert run.versions[-1] == 0


def scattered(options: ControllerOptions | None = None, times: int = 1) -> Run:
    """A run in which every other step took longer before the link turned slow, so that the plan for that waits."""
    run = Run(PolicyWorld(plan_zero(), RANKS, PLANNING, options))
    run.steps(CALIBRATED, HEALTHY)
    for _ in range(times):
        run.steps(1, HEALTHY, SECONDS + 0.8)
        run.steps(1, HEALTHY)
    run.world.actions.clear()
    run.steps(2, SLOW, SECONDS + 0.8)
    assert run.world.events(EventKind.KEPT)[0].text.startswith("steps scatter by ")
    return run


def test_a_plan_that_waits_for_scattered_steps_comes_once_enough_of_them_were_calm() -> None:
    """Of the first five differences between steps three are large. Steps that follow show that the noise was one step's."""
    run = scattered()
    waits = int(run.world.events(EventKind.KEPT)[0].text.split(" steps after step ")[0].rsplit(" ", 1)[1])
    detected = len(run.versions) - 1
    run.steps(5, SLOW, SECONDS + 0.8)
    assert run.world.plan.program == SLOW_PROGRAM
    assert run.world.plan.reason == run.world.events(EventKind.DETECTED)[0].text
    assert run.versions.index(1) - detected <= 5 < waits


def test_a_plan_names_the_changes_that_waited_for_one_and_were_overtaken() -> None:
    """The link turned slow, and then a stage while the plan for the link waited: the link must not miss the delegate."""
    run = scattered(ControllerOptions(delegate=True), times=4)
    run.steps(12, SLOW.with_stage(3, 0.026, 0.026, 0.013), SECONDS + 0.8)
    assert [len(event.text.split("; ")) for event in run.world.events(EventKind.DETECTED)] == [2, 1]
    plan = run.world.plan
    assert (plan.program, plan.delegated) == (SLOW_PROGRAM, ((1, 2), (2, 1)))
    assert "edge 1→2 slow" in plan.reason and "stage 3 slow" in plan.reason


def test_a_planner_without_a_plan_keeps_the_old_one() -> None:
    def no_plan(case: Case, incumbent: Program) -> Program:
        raise PlanError("fits nowhere")

    run = Run(PolicyWorld(plan_zero(), RANKS, Planning(no_plan)))
    run.steps(CALIBRATED, HEALTHY)
    assert [event.text for event in run.world.events(EventKind.KEPT)] == ["no other plan: fits nowhere"]


def test_a_bug_in_the_planner_is_raised() -> None:
    def broken(case: Case, incumbent: Program) -> Program:
        return [][len(case.name)]

    run = Run(PolicyWorld(plan_zero(), RANKS, Planning(broken)))
    with pytest.raises(IndexError):
        run.steps(CALIBRATED, HEALTHY)


def test_a_suggested_program_is_proposed_whatever_it_gains() -> None:
    run = calibrated()
    run.world.policy.suggest(SLOW_PROGRAM, "a user's wish")
    run.steps(2, HEALTHY)
    assert run.world.plan.program == SLOW_PROGRAM and run.world.plan.reason == "a user's wish"


# ── a barrier ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ranks_that_meet_from_the_start_are_planned_for_with_the_calibration() -> None:
    run = Run(PolicyWorld(plan_zero(), RANKS, PLANNING))
    run.steps(30, HEALTHY, has_met=True)
    (detected,) = run.world.events(EventKind.DETECTED)
    assert detected.text == "all ranks meet between steps"
    case = run.world.plan.case
    assert case.barrier and run.world.plan.predicted == step_seconds(run.world.plan.program, case.cost, barrier=True)


def test_a_meeting_that_begins_or_ends_later_is_detected_once_and_planned_for() -> None:
    run = calibrated()
    before = run.world.plan
    run.steps(20, HEALTHY, has_met=True)
    (detected,) = run.world.events(EventKind.DETECTED)
    assert detected.text == "all ranks meet between steps"
    (proposed,) = run.of(Propose)
    assert proposed.plan.case.barrier and not proposed.is_speculative
    assert run.world.plan.program == before.program and run.world.plan.predicted > before.predicted
    run.steps(20, HEALTHY)
    assert [one.text for one in run.world.events(EventKind.DETECTED)][1:] == ["ranks meet no more between steps"]
    assert not run.world.plan.case.barrier and run.world.plan.predicted == before.predicted


def test_a_slow_edge_behind_a_barrier_is_planned_for_by_the_makespan() -> None:
    run = Run(PolicyWorld(plan_zero(), RANKS, PLANNING))
    run.steps(CALIBRATED + 8, HEALTHY, has_met=True)
    run.steps(10, SLOW, has_met=True)
    plan = run.world.plan
    assert plan.case.barrier and plan.predicted == step_seconds(plan.program, SLOW, barrier=True)
    events = run.world.events(EventKind.KEPT)
    assert not any("meet" in event.text for event in events)


def test_without_adapting_it_is_told_and_nothing_is_proposed() -> None:
    run = Run(PolicyWorld(plan_zero(), RANKS, PLANNING, ControllerOptions(adapt=False)))
    run.steps(20, HEALTHY, has_met=True)
    assert [one.text for one in run.world.events(EventKind.DETECTED)] == ["all ranks meet between steps"]
    assert not run.of(Propose)


def test_a_slow_edge_takes_the_delegate_where_no_order_gains_and_returns_once_it_has_recovered() -> None:
    """All microbatches that fit are in flight already, so nothing hides more of a delay."""
    keeping = Planning(lambda _, running: running)
    run = calibrated(PolicyWorld(plan_zero(SLOW_PROGRAM), RANKS, keeping, ControllerOptions(delegate=True)))
    run.steps(3, SLOW)
    slow = run.world.plan
    assert (slow.version, slow.program, slow.delegated) == (1, SLOW_PROGRAM, ((1, 2), (2, 1)))
    assert slow.reason.endswith("; the same order; edges that take the delegate: 1→2, 2→1")
    run.steps(3, HEALTHY)
    back = run.world.plan
    assert (back.version, back.program, back.delegated) == (2, SLOW_PROGRAM, ())
    assert back.reason.endswith("; the same order; edges that leave the delegate: 1→2, 2→1")
    run.steps(10, HEALTHY)
    assert run.world.plan.version == 2


def test_an_edge_that_flaps_stays_on_the_delegate_for_as_long_as_it_may_turn_slow_again() -> None:
    keeping = Planning(lambda _, running: running)
    run = calibrated(PolicyWorld(plan_zero(SLOW_PROGRAM), RANKS, keeping, ControllerOptions(delegate=True)))
    waits: list[int] = []
    for _ in range(3):
        run.steps(6, SLOW)
        assert run.world.plan.delegated == ((1, 2), (2, 1))
        recovered = len(run.versions) - 1
        run.steps(12, HEALTHY)
        assert run.world.plan.delegated == ()
        waits.append(run.versions.index(run.world.plan.version) - recovered)
    assert waits == [3, 5, 7], "a step longer than a plan that wins, which is drafted before its change is confirmed"


def test_an_edge_moves_once_what_it_takes_longer_stands_out_of_the_noise_of_steps() -> None:
    keeping = Planning(lambda _, running: running)
    run = Run(PolicyWorld(plan_zero(SLOW_PROGRAM), RANKS, keeping, ControllerOptions(delegate=True)))
    for _ in range(CALIBRATED):
        run.steps(1, HEALTHY, SECONDS + 0.8)
        run.steps(1, HEALTHY)
    run.steps(4, SLOW, SECONDS + 0.8)
    assert run.world.plan.delegated == ()
    assert run.world.events(EventKind.KEPT)[-1].text.startswith("steps scatter by ")
    run.steps(60, SLOW, SECONDS + 0.8)
    assert run.world.plan.delegated == ((1, 2), (2, 1))


def test_a_slow_edge_stays_where_it_is_without_a_delegate() -> None:
    run = calibrated(PolicyWorld(plan_zero(SLOW_PROGRAM), RANKS, Planning(lambda _, running: running)))
    run.steps(20, SLOW)
    assert set(run.versions) == {0} and not run.of(Propose)
