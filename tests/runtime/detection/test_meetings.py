"""Whether ranks meet between steps, as their measurements say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from controller_world import HEALTHY, measurement

from adaptra.errors import ControlError
from adaptra.runtime.detection.meetings import AGREEING, Meetings
from adaptra.runtime.detection.news import NewsTeller
from adaptra.runtime.measuring.measurement import StepMeasurement
from adaptra.runtime.measuring.monitor import Monitor


def of_step(step: int, *has_met: bool) -> list[StepMeasurement]:
    return [replace(measurement(rank, step, HEALTHY), has_met=met) for rank, met in enumerate(has_met)]


def test_it_counts_once_steps_in_a_row_say_so_and_the_first_follows_none() -> None:
    meetings = Meetings()
    assert not meetings.observe(0, of_step(0, True, True)), "nothing came before it"
    said = [meetings.observe(step, of_step(step, step > 3, False)) for step in range(1, 8)]
    assert said == [step == 3 + AGREEING for step in range(1, 8)] and meetings.barrier
    assert not meetings.observe(8, of_step(8, False, False)) and meetings.barrier, "one step left it out"
    assert not meetings.observe(9, of_step(9, True, True))
    said = [meetings.observe(step, of_step(step, False, False)) for step in range(10, 10 + AGREEING)]
    assert said[-1] and not any(said[:-1]) and not meetings.barrier


def test_a_rare_meeting_does_not_count() -> None:
    meetings = Meetings()
    assert not any(meetings.observe(step, of_step(step, step % 3 == 0)) for step in range(1, 40))


def test_the_monitor_tells_it_of_the_next_step_and_of_that_one_only() -> None:
    monitor = Monitor(0, (0,))
    measured: list[bool] = []
    for step in range(4):
        monitor.begin_step()
        measured.append(monitor.end_step(step, 0.0, 1.0).has_met)
        if step == 1:
            monitor.meet(all_ranks=True)
    assert measured == [False, False, True, False]


def test_it_travels_with_a_measurement_and_is_news() -> None:
    plain, met = of_step(5, False, True)
    assert StepMeasurement.from_json(met.to_json()) == met and "has_met" not in plain.to_json()
    with pytest.raises(ControlError, match="'has_met': expected true or false"):
        StepMeasurement.from_json(met.to_json() | {"has_met": 1})
    teller = NewsTeller()
    told = [len(teller.tell([measurement(0, step, HEALTHY)])) for step in range(40)]
    assert told[0] == 1 and told[-1] == 0
    assert teller.tell([replace(measurement(0, 41, HEALTHY), has_met=True)])
