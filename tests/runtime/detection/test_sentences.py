"""What events say of two numbers is true of them as printed."""

from __future__ import annotations

import pytest

from adaptra.runtime.detection.changes import EdgeChange, StageChange
from adaptra.unlike_numbers import instead_of, milliseconds_apart


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (0.060, 0.0002, ("60.0 ms", "0.2 ms")),
        (0.00044, 0.00036, ("0.44 ms", "0.36 ms")),
        (0.49481, 0.49484, ("494.81 ms", "494.84 ms")),
        (0.4, 0.4, ("400.0 ms", "400.0 ms")),
        (0.4, 0.4 + 1e-13, ("400.0 ms", "400.0 ms")),
    ],
)
def test_times_that_differ_print_differently(one: float, other: float, texts: tuple[str, str]) -> None:
    assert milliseconds_apart(one, other) == texts


def test_a_time_is_not_instead_of_itself() -> None:
    assert instead_of(0.49481, 0.49484) == "494.81 ms instead of 494.84 ms"
    assert instead_of(0.4948, 0.4948) == "494.8 ms, as before"


def edge(now: float, was: float, occupancy: float = 0.0, occupancy_was: float = 0.0, is_healed: bool = False) -> str:
    return str(EdgeChange(0, 1, was, now, was, occupancy_was, occupancy, occupancy, is_healed))


def test_a_slow_edge_is_slow_by_what_its_sentence_says() -> None:
    assert edge(0.06, 0.0002) == "edge 0→1 slow: 60.0 ms (was 0.2 ms)"
    assert edge(0.00044, 0.00036) == "edge 0→1 slow: 0.44 ms (was 0.36 ms)"
    assert edge(0.0004, 0.0004, 0.0003) == "edge 0→1 slow: 0.4 ms as before, 0.3 ms of it occupancy (was 0.0 ms)"
    assert edge(0.0004, 0.00042, 0.0003) == "edge 0→1 slow: 0.40 ms (was 0.42 ms), 0.3 ms of it occupancy (was 0.0 ms)"
    assert edge(0.0004, 0.0004, is_healed=True) == "edge 0→1 healed: 0.4 ms as before"


def test_a_slow_stage_is_slow_beside_what_it_was() -> None:
    assert str(StageChange(1, 0.01, 0.02, 0.01, False)) == "stage 1 slow: 2.00x the calibrated time"
    assert str(StageChange(1, 0.008, 0.01, 0.01, False)) == "stage 1 slow: 1.00x the calibrated time (was 0.80x)"
