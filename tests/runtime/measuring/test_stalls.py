"""Stalls: what a path holds up is told from a slow link, a queue and a rank that begins late."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from adaptra.runtime.measuring.measurement import Stalls
from adaptra.runtime.measuring.stalls import StallTracker

Flights = list[tuple[float, float]]


def step(took: Iterable[float], apart: float = 0.02) -> Flights:
    """Messages sent so far apart that took so long, in order: none arrives before the one ahead of it."""
    found: Flights = []
    for index, seconds in enumerate(took):
        sent = apart * index
        found.append((sent, max(sent + seconds, found[-1][1] if found else 0.0)))
    return found


FAST = [0.001] * 16


def observe(steps: Iterable[Flights]) -> list[Stalls]:
    stalling = StallTracker()
    return [stalling.observe(flights)[0] for flights in steps]


def test_a_lost_message_stalls_and_those_behind_it_are_late() -> None:
    """200 ms hold up five messages sent 40 ms apart; the others say how fast the path is."""
    lost = step([*FAST[:3], 0.2, *FAST[4:]], apart=0.04)
    stalls, prompt = StallTracker().observe(lost)
    assert (stalls.count, stalls.late) == (1, 5)
    assert stalls.lateness == pytest.approx(sum(0.199 - 0.04 * k for k in range(5)))
    assert prompt == [*lost[:3], *lost[8:]]


def test_if_most_are_late_the_step_is_judged_by_all() -> None:
    lost = step([0.001, 0.3, *FAST[2:]])
    stalls, prompt = StallTracker().observe(lost)
    assert (stalls.count, stalls.late, prompt) == (1, 15, lost)


def test_a_link_that_turns_slow_stalls_once_and_healing_is_no_stall() -> None:
    slow = step([0.16] * 16)
    found = observe([step(FAST)] * 3 + [slow] * 5 + [step(FAST)] * 3)
    assert [stalls.count for stalls in found] == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]


def test_a_path_that_alternates_stalls_each_time() -> None:
    found = observe([step(FAST), step([0.16] * 16)] * 4)
    assert [stalls.count for stalls in found] == [0, 1] * 4
    assert [stalls.late for stalls in found] == [0, 16] * 4


@pytest.mark.parametrize("seed", range(10))
def test_messages_that_queue_for_a_rate_do_not_stall(seed: int) -> None:
    """Each keeps the next one from departing for 160 ms; a burst queues up, later ones find the edge free."""
    dice = random.Random(seed)

    def queued() -> Flights:
        sent = sorted([dice.uniform(0.0, 0.1) for _ in range(6)] + [dice.uniform(0.1, 3.0) for _ in range(10)])
        free, found = 0.0, list[tuple[float, float]]()
        for at in sent:
            free = max(at, free) + 0.16
            found.append((at, free + 0.001))
        return found

    assert [stalls.count for stalls in observe(queued() for _ in range(10))] == [0] * 10


def test_what_was_sent_before_its_receiver_began_the_step_says_nothing() -> None:
    """As when that rank's data loader was slow: the first messages waited for it, some for its whole step."""
    begins_late = [(sent, max(arrived, 0.15)) for sent, arrived in step(FAST)]
    stalling = StallTracker()
    stalling.observe(step(FAST))
    waited = [flight for flight in begins_late if flight[0] < 0.15]
    assert stalling.observe(begins_late[len(waited) :], waited)[0] == Stalls()
    assert StallTracker().observe(begins_late)[0] == Stalls()
    assert stalling.observe([], [(0.0, 5.0)])[0] == Stalls()
    assert stalling.observe(begins_late)[0].count == 1
