"""When ops began and ended on the device that runs them, in seconds of the monotonic clock.

On a CPU an op has ended when its call returns. On a GPU the call returns once the op is queued, so its beginning and its end
are events in the stream. What these say is only known once the GPU has come past them: it is read when a step ends, and that
waits for the step's last op.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Mark = float | torch.cuda.Event
"""A moment: seconds, or an event that tells them later."""

E = TypeVar("E", bound="TimedEvent")


class TimedEvent(Protocol):
    """What is needed of an event: that of a CUDA stream, with timing enabled."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        ...

    def elapsed_time(self: E, end_event: E, /) -> float:
        """Milliseconds from this event to another."""
        ...


class OpClock:
    """Marks moments of a rank's device.

    Args:
        device: Runs the ops.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream_of = device if device.type == "cuda" else None
        self._free: list[torch.cuda.Event] = []

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> OpClock:
        """The clock of the device that holds a stage's tensors; of the host if there are none."""
        return OpClock(next((one.device for one in tensors if one.is_cuda), torch.device("cpu")))

    def mark(self) -> Mark:
        """This moment, in the order of what has been queued."""
        if self._stream_of is None:
            return time.monotonic()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._stream_of))
        return event

    def read(self, marks: Sequence[Mark]) -> list[float]:
        """The seconds of marks, in their order; the last one is the latest. They are not used again."""
        events = [mark for mark in marks if isinstance(mark, torch.cuda.Event)]
        found = iter(seconds_of(events))
        self._free += events
        return [next(found) if isinstance(mark, torch.cuda.Event) else mark for mark in marks]


def seconds_of(events: Sequence[TimedEvent]) -> list[float]:
    """When the device came to each of these events, once it has come to the last one."""
    if not events:
        return []
    last = events[-1]
    last.synchronize()
    now = time.monotonic()
    return [now - event.elapsed_time(last) / 1e3 for event in events]
