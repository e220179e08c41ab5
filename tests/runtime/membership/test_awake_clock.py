"""The clock that stands still while its process does."""

from adaptra.runtime.membership.awake_clock import AwakeClock


class Seconds:
    """A clock that a test moves on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_it_runs_while_it_is_ticked() -> None:
    seconds = Seconds()
    clock = AwakeClock(0.5, seconds)
    for _ in range(20):
        seconds.now += 0.75
        clock.tick()
    assert clock.now() == 15
    seconds.now += 0.25
    assert clock.now() == 15.25


def test_a_time_without_ticks_counts_two_ticks_at_most() -> None:
    seconds = Seconds()
    clock = AwakeClock(0.5, seconds)
    seconds.now += 100
    assert clock.now() == 1
    clock.tick()
    assert clock.now() == 1
    seconds.now += 0.25
    assert clock.now() == 1.25
