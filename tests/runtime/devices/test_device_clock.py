"""When ops began and ended: the host's clock on a CPU, events of the stream on a GPU."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from adaptra.runtime.devices.device_clock import OpClock, seconds_of


class QueuedEvent:
    """An event of a queue that the host is ahead of: its time is known once it is waited for."""

    def __init__(self, at: float) -> None:
        self.at = at
        self.is_waited_for = False

    def synchronize(self) -> None:
        self.is_waited_for = True

    def elapsed_time(self, end_event: QueuedEvent) -> float:
        assert end_event.is_waited_for, "asked for an event that the device may not have come to"
        return 1e3 * (end_event.at - self.at)


def test_events_are_read_backwards_from_the_present_one_which_alone_is_waited_for() -> None:
    """The last op may have ended long before its events are read: here by one second, in which the rank waited for losses."""
    events, present = [QueuedEvent(at) for at in (0.5, 1.5, 1.75, 4.0)], QueuedEvent(5.0)
    before = time.monotonic()
    found = seconds_of(events, present)
    after = time.monotonic()
    assert [later - earlier for earlier, later in pairwise(found)] == pytest.approx([1.0, 0.25, 2.25])
    assert before - 1.0 <= found[-1] <= after - 1.0
    assert present.is_waited_for and not any(event.is_waited_for for event in events)
    assert seconds_of([], present) == []


def test_on_a_cpu_a_mark_is_the_monotonic_clock() -> None:
    clock = OpClock(torch.device("cpu"))
    before = time.monotonic()
    marks = [clock.mark(), clock.mark()]
    first, second = clock.read(marks)
    assert before <= first <= second <= time.monotonic()
    assert marks == [first, second]
    assert OpClock(torch.device("cpu")).read([]) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_gpu_ops_last_as_long_as_their_kernels_and_not_as_their_calls() -> None:
    matrix = torch.randn(4096, 4096, device="cuda")
    clock = OpClock(matrix.device)
    (matrix @ matrix).sum().item()
    for _ in range(2):  # the second time with events that have been read
        before, marks = time.monotonic(), []
        for repetitions in (1, 8):
            marks.append(clock.mark())
            for _ in range(repetitions):
                torch.mm(matrix, matrix)
            marks.append(clock.mark())
        called = time.monotonic()
        begun, ended, begun_8, ended_8 = clock.read(marks)
        after = time.monotonic()
        assert before - 1e-3 <= begun <= ended <= begun_8 <= ended_8 <= after
        assert 4 < (ended_8 - begun_8) / (ended - begun) < 16
        assert ended_8 > called, "the calls returned before their kernels had run"
