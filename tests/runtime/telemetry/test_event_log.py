"""The checker of event logs finds what must never be."""

from __future__ import annotations

import pytest
from event_log import check_events, event

from adaptra.runtime.control.plans.events import ControlEvent, EventKind

C, S, A, W = EventKind.CONFIRMED, EventKind.SWITCHED, EventKind.AGREED, EventKind.WITHDRAWN


def log(rank: int, *told: tuple[EventKind, int, int]) -> list[ControlEvent]:
    return [event(kind, rank, step, version) for kind, step, version in told]


def test_a_run_as_it_should_be() -> None:
    coordinator = log(0, (C, 1, 1), (A, 4, 1), (S, 4, 1), (C, 7, 2), (C, 9, 3), (W, 9, 3))
    other = log(1, (C, 2, 1), (S, 4, 1), (C, 7, 2), (C, 8, 3))
    behind = log(2, (C, 2, 1))
    assert check_events({0: coordinator, 1: other, 2: behind}, {0: 9, 1: 8, 2: 4}) == {1: 4}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([(C, 1, 1), (S, 4, 1)], [(C, 1, 1), (S, 5, 1)], "rank 1 switched to plan 1 at step 5, another at 4"),
        ([(C, 1, 1), (S, 4, 1)], [(C, 1, 1)], "rank 1 ran the steps before 9: plan 1 began at 4"),
        ([(C, 1, 1), (S, 4, 1)], [(S, 4, 1)], "rank 1 never confirmed plan 1"),
        ([(C, 1, 1), (S, 4, 1)], [(S, 4, 1), (C, 4, 1)], "rank 1 ran plan 1 before it confirmed it"),
        ([(C, 1, 2), (S, 4, 2), (C, 4, 1), (S, 5, 1)], [], "rank 0: plan 1 at step 5 after 2 at 4"),
        ([(C, 1, 1), (A, 5, 1), (S, 4, 1)], [(C, 1, 1), (S, 4, 1)], "plan 1 was agreed for step 5, and ran from 4"),
        ([(C, 1, 1), (A, 4, 1), (S, 4, 1)], [(C, 1, 1), (S, 4, 1), (A, 4, 1)], "plan 1 was agreed twice"),
        ([(C, 1, 1), (W, 3, 1), (S, 4, 1)], [(C, 1, 1), (S, 4, 1)], "plan 1 was withdrawn, and ran"),
    ],
)
def test_a_run_that_is_not(
    first: list[tuple[EventKind, int, int]], second: list[tuple[EventKind, int, int]], message: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        check_events({0: log(0, *first), 1: log(1, *second)}, {0: 9, 1: 9})
    assert str(caught.value).startswith(message)
