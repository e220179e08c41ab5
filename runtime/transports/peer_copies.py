"""Copies of messages from one GPU of a process to another, on streams of their own, ordered by events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from adaptra.runtime.transports.base import ChannelClass


class PeerCopies:
    """The copies to one rank.

    torch has both devices' present streams wait for each other around a copy between them. So each channel has a stream on
    either device. Compute waits for no copy that it doesn't need, nor does the message of another channel.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[tuple[torch.device, torch.device, ChannelClass], tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def to(
        self,
        device: torch.device,
        tensors: Sequence[Tensor],
        ready: Mapping[torch.device, torch.Event],
        channel: ChannelClass,
    ) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        """Start to copy those tensors of a message that lie on another GPU.

        Args:
            device: The receiver's GPU.
            tensors: The tensors of the message, of which those of the host stay there.
            ready: For each GPU with tensors of the message, the event after which they are there.
            channel: The class of the message's channel.

        Returns:
            The tensors as the receiver gets them. Then what lets the calling thread's present stream use them.
        """
        arrived: list[Tensor] = []
        copied: list[tuple[Tensor, torch.Event]] = []
        for tensor in tensors:
            if tensor.is_cuda and tensor.device != device:
                with self._lock:
                    there, here = self._streams_of(tensor.device, device, channel)
                    there.wait_event(ready[tensor.device])
                    with torch.cuda.stream(there), torch.cuda.stream(here):
                        copy = tensor.to(device, non_blocking=True)
                    copied.append((copy, here.record_event()))
                tensor.record_stream(there)
                arrived.append(copy)
            else:
                arrived.append(tensor)

        def use() -> None:
            stream = torch.cuda.current_stream(device)
            for copy, event in copied:
                stream.wait_event(event)
                copy.record_stream(stream)

        return tuple(arrived), use

    def _streams_of(
        self, there: torch.device, here: torch.device, channel: ChannelClass
    ) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        key = there, here, channel
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(there), torch.cuda.Stream(here)
        return self._streams[key]
