"""What clocks gain on one another is taken out of flights, and what links really do is left in."""

from __future__ import annotations

import pytest

from adaptra.runtime.detection.clock_drift import ClockDrift
from adaptra.runtime.measuring.measurement import EdgeEstimate, EdgeMeasurement

LEVELS = {(0, 1): 0.002, (1, 0): 0.003}


def corrected(clocks: ClockDrift, forwards: float, backwards: float, noise: float = 0.001) -> dict[tuple[int, int], float]:
    """The flights of a step of one second."""
    edges = [
        EdgeMeasurement(source, destination, 8, 0.0, EdgeEstimate(flight, None, 0.02))
        for source, destination, flight in ((0, 1, forwards), (1, 0, backwards))
    ]
    found = clocks.correct(edges, LEVELS, lambda _: noise, 1.0)
    return {(edge.source, edge.destination): edge.estimate.flight for edge in found}


def test_a_clock_that_gains_changes_no_flight_even_below_zero() -> None:
    clocks = ClockDrift()
    for gained in (0.001, 0.05, 3.0, -2.0):
        assert corrected(clocks, 0.002 + gained, 0.003 - gained) == pytest.approx(LEVELS)
        assert clocks.gained(0) == pytest.approx(gained)


@pytest.mark.parametrize("slow", [(0.06, 0.0), (0.0, 0.06), (0.06, 0.06), (0.06, 0.02)])
def test_a_link_that_turns_slow_one_way_or_both_is_not_taken_for_a_clock(slow: tuple[float, float]) -> None:
    clocks = ClockDrift()
    corrected(clocks, 0.002 + 0.5, 0.003 - 0.5)
    for _ in range(3):
        found = corrected(clocks, 0.002 + 0.5 + slow[0], 0.003 - 0.5 + slow[1])
        assert found == pytest.approx({(0, 1): 0.002 + slow[0], (1, 0): 0.003 + slow[1]})


@pytest.mark.parametrize("late", [(0.13, 0.0), (0.0, -0.13), (0.13, 0.06), (0.13, -0.05)])
def test_noise_that_would_allow_it_does_not_turn_a_change_of_one_direction_into_a_clock(late: tuple[float, float]) -> None:
    """Half of the change would have passed for drift, and the other half for noise."""
    clocks = ClockDrift()
    corrected(clocks, 0.002 + 0.5, 0.003 - 0.5)
    for _ in range(20):
        found = corrected(clocks, 0.002 + 0.5 + late[0], 0.003 - 0.5 + late[1], noise=1.0)
        assert found == pytest.approx({(0, 1): 0.002 + late[0], (1, 0): max(0.003 + late[1], 0.0)})


def test_drift_as_fast_as_clocks_is_taken_out_where_noise_hides_that_it_keeps_the_sum() -> None:
    clocks = ClockDrift()
    for step in range(1, 200):
        gained, noise = 8e-4 * step, 0.002 * (-1) ** step
        corrected(clocks, 0.002 + gained + noise, 0.003 - gained, noise=0.005)
        assert clocks.gained(0) == pytest.approx(gained, abs=0.003)


def test_links_measured_one_way_or_not_known_are_left_alone() -> None:
    clocks = ClockDrift()
    alone = EdgeMeasurement(0, 1, 8, 0.0, EdgeEstimate(0.5, None, 0.02))
    assert clocks.correct([alone], LEVELS, lambda _: 0.001, 1.0) == (alone,)
    unknown = [EdgeMeasurement(*edge, 8, 0.0, EdgeEstimate(0.5, None, 0.02)) for edge in ((2, 3), (3, 2))]
    assert clocks.correct(unknown, LEVELS, lambda _: 0.001, 1.0) == tuple(unknown)
