"""The clock that stands still while its process does."""

import ctypes
import threading
import time

from adaptra.runtime.membership.awake_clock import AwakeClock


def test_it_runs_while_it_is_ticked() -> None:
    clock = AwakeClock(0.5)
    began, was = time.monotonic(), clock.now()
    for _ in range(20):
        threading.Event().wait(0.005)
        clock.tick()
    assert clock.now() - was <= time.monotonic() - began
    assert clock.now() - was >= 0.1


def test_a_time_without_ticks_counts_two_ticks_at_most() -> None:
    clock = AwakeClock(0.01)
    ctypes.PyDLL(None).usleep(200_000)
    assert clock.now() == 0.02
    clock.tick()
    assert 0.02 <= clock.now() <= 0.04
