"""Suspicions: new ones are planned for, standing ones are not planned for again, false ones make the next wait."""

from __future__ import annotations

from itertools import pairwise

from adaptra.runtime.detection.changes import EdgeChange, StageChange
from adaptra.runtime.detection.detector import Detection
from adaptra.runtime.detection.speculation import FIRST_PAUSE, MOST_PAUSE, Speculation
from adaptra.simulation.cost import CostModel

COST = CostModel.uniform(3, 0.02, 0.02, 0.02)


def slow_edge(seconds: float, source: int = 0) -> Detection:
    change = EdgeChange(source, source + 1, 0.001, seconds, 0.001, 0.0, 0.0, 0.0, is_healed=False)
    return Detection(5, (change,), COST)


def test_a_suspicion_stays_the_same_while_it_says_about_the_same() -> None:
    foresight, first, other = Speculation(), slow_edge(0.05), slow_edge(0.052)
    foresight.suspect(5, first)
    foresight.suspect(6, other)
    assert foresight.suspicion is first
    much = slow_edge(0.09)
    foresight.suspect(7, much)
    assert foresight.suspicion is much
    elsewhere = slow_edge(0.09, source=1)
    foresight.suspect(8, elsewhere)
    assert foresight.suspicion is elsewhere
    stage = Detection(9, (StageChange(1, 0.06, 0.09, 0.06, is_healed=False),), COST)
    foresight.suspect(9, stage)
    assert foresight.suspicion is stage


def test_each_false_suspicion_doubles_the_pause_and_a_true_one_ends_it() -> None:
    foresight, step = Speculation(), 5
    for pause in (FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE):
        foresight.suspect(step, slow_edge(0.05))
        assert foresight.suspicion is not None
        foresight.suspect(step + 1, None)
        assert foresight.suspicion is None
        foresight.suspect(step + pause, slow_edge(0.05))
        assert foresight.suspicion is None, "one step too early"
        foresight.suspect(step + pause, None)
        step += 1 + pause
    foresight.confirm()
    foresight.suspect(step, slow_edge(0.05))
    assert foresight.suspicion is not None


def test_what_came_to_nothing_makes_only_its_own_places_wait() -> None:
    foresight = Speculation()
    foresight.suspect(5, slow_edge(0.05))
    foresight.suspect(6, None)
    elsewhere = slow_edge(0.05, source=1)
    foresight.suspect(7, elsewhere)
    assert foresight.suspicion is elsewhere
    both = Detection(8, (*slow_edge(0.05).changes, *elsewhere.changes), COST)
    foresight.suspect(8, both)
    assert foresight.suspicion is both


def test_the_pause_stays_within_a_few_steps_however_many_suspicions_were_false() -> None:
    """A machine that is always noisy must not switch planning ahead off for good."""
    foresight, planned, step = Speculation(), list[int](), 5
    for _ in range(200):
        foresight.suspect(step, slow_edge(0.05))
        if foresight.suspicion is not None:
            planned.append(step)
        foresight.suspect(step + 1, None)
        step += 2
    gaps = [later - earlier for earlier, later in pairwise(planned)]
    assert gaps[0] < gaps[-1] <= MOST_PAUSE + 2
