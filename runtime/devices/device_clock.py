"""Start and end times of ops on the device that runs them, in seconds of the monotonic clock.

On a CPU an op has ended when its call returns. On a GPU the call returns once the op is queued, so its start and end are events
in the stream. Their times are known only once the GPU has passed them. So they are read when a step ends, which waits for the
step's last op.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Mark = float | torch.cuda.Event
"""A time: seconds, or an event whose time is known later."""

E = TypeVar("E", bound="TimedEvent")


class TimedEvent(Protocol):
    """The interface of an event: that of a CUDA stream, with timing enabled."""

    def synchronize(self) -> None:
        """Wait until the device has passed the event."""
        ...

    def elapsed_time(self: E, end_event: E, /) -> float:
        """Return the milliseconds from this event to another."""
        ...


class OpClock:
    """Marks times of a rank's device.

    Args:
        device: Runs the ops.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream_of = device if device.type == "cuda" else None
        self._free: list[torch.cuda.Event] = []

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> OpClock:
        """Return the clock of the device that has a stage's tensors; of the host if there are none."""
        return OpClock(next((one.device for one in tensors if one.is_cuda), torch.device("cpu")))

    def mark(self) -> Mark:
        """Mark the present time, in the order of the queued ops."""
        if self._stream_of is None:
            return time.monotonic()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._stream_of))
        return event

    def read(self, marks: Sequence[Mark]) -> list[float]:
        """Return the seconds of marks, in their order; the last one is the latest. The marks must not be used again."""
        events = [mark for mark in marks if isinstance(mark, torch.cuda.Event)]
        found = iter(seconds_of(events))
        self._free += events
        return [next(found) if isinstance(mark, torch.cuda.Event) else mark for mark in marks]


def seconds_of(events: Sequence[TimedEvent]) -> list[float]:
    """Return the times at which the device passed these events, seconds, after waiting for the last one."""
    if not events:
        return []
    last = events[-1]
    last.synchronize()
    now = time.monotonic()
    return [now - event.elapsed_time(last) / 1e3 for event in events]
