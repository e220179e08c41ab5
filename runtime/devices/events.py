"""Events of a GPU's streams."""

from __future__ import annotations

import torch


def recorded(stream: torch.cuda.Stream, *, sleeps: bool = False) -> torch.cuda.Event:
    """Return an event that is done when all work of a stream so far is.

    Args:
        stream: The stream.
        sleeps: Whether a thread that waits for the event sleeps meanwhile.
    """
    event = torch.cuda.Event(blocking=sleeps)
    event.record(stream)
    return event
