"""Device memory that the program has reserved for received messages."""

from __future__ import annotations

import torch

from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.devices.events import recorded
from adaptra.runtime.transports.message_format import flat_bytes, views_of


class Room:
    """Device memory of received messages, one after the other.

    Args:
        specs: One per tensor.
        device: A CUDA device.
        arrivals: The stream that fills it.

    Attributes:
        flat: The message as it travels, (bytes,) uint8.
        tensors: Its tensors; views of ``flat``, unless they travel rounded.
        widened: Tensors that travel rounded, each with its view of ``flat``.
        stream: The stream whose work uses the message that it holds.
        read: What the device must pass before it is filled again.
    """

    def __init__(self, specs: MessageSpec, device: torch.device, arrivals: torch.cuda.Stream) -> None:
        self.flat = torch.empty(flat_bytes(specs), dtype=torch.uint8, device=device)
        views = views_of(self.flat, specs)
        self.tensors = tuple(
            view if view.dtype == spec.dtype else torch.empty(spec.shape, dtype=spec.dtype, device=device)
            for view, spec in zip(views, specs, strict=True)
        )
        self.widened = [(wide, view) for wide, view in zip(self.tensors, views, strict=True) if wide.dtype != view.dtype]
        for memory in (self.flat, *(wide for wide, _ in self.widened)):
            memory.record_stream(arrivals)
        self.stream: torch.cuda.Stream | None = None
        self.read: tuple[torch.cuda.Event, ...] = (recorded(torch.cuda.current_stream(device)),)

    def wait(self) -> None:
        """Wait until the device has done all that read its last message."""
        for event in self.read:
            if not event.query():
                event.synchronize()
        self.read = ()
