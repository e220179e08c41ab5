"""Start and end times of ops on the device that runs them, in seconds of the monotonic clock.

On a CPU an op has ended when its call returns. On a GPU the call returns once the op is queued, so its start and end are events
in the stream. Their times are known only once the GPU has passed them. So they are read when a step ends, which waits for the
step's last op.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

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

    def mark(self) -> Mark:
        """Mark the present time, in the order of the queued ops."""
        if self._stream_of is None:
            return time.monotonic()
        try:
            event = self._free.pop()
        except IndexError:  # asked for by then: another thread may have taken the last one
            event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._stream_of))
        return event

    def read(self, marks: Sequence[Mark]) -> list[float]:
        """Return the seconds of marks, in their order, once the device has passed them. They must not be used again."""
        events = list(dict.fromkeys(mark for mark in marks if isinstance(mark, torch.cuda.Event)))
        if not events:
            return [mark for mark in marks if not isinstance(mark, torch.cuda.Event)]
        present = self.mark()
        assert isinstance(present, torch.cuda.Event), "the clock of a GPU marks by events"
        seconds = dict(zip(events, seconds_of(events, present), strict=True))
        self._free += [*events, present]
        return [seconds[mark] if isinstance(mark, torch.cuda.Event) else mark for mark in marks]


def seconds_of(events: Sequence[E], present: E) -> list[float]:
    """Return the times at which the device passed these events, seconds.

    ``present`` was recorded just now, after them, and is waited for. The last of the events may have passed long ago, so it
    says nothing of the host's clock.
    """
    present.synchronize()
    now = time.monotonic()
    return [now - event.elapsed_time(present) / 1e3 for event in events]
