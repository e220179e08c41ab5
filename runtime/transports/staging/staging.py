"""Copies between a GPU's memory and the engine's on streams of their own, so that compute waits only for the copies it needs.

The engine's memory is registered with CUDA, so copies to and from it run asynchronously. Each direction has a stream and a
thread: a message that arrived waits for none that is still to be computed. A thread waits for a copy's event, then sends the
message or refills the slot. A sent tensor is recorded on the copy stream, so its memory is not reused before the copy's end.

A received message goes to a :class:`.room.Room`, device memory that the program has reserved. It takes one message after the
other, each once the device has done all that read the one before. The channel's own thread waits for that, so a message of
another channel waits for nothing.

A message of several tensors, or of one that isn't contiguous, is packed on the GPU first where Triton works, see :mod:`.pack`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from adaptra import _C
from adaptra.errors import LaunchError
from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.devices import pack
from adaptra.runtime.devices.events import recorded
from adaptra.runtime.transports.message_format import copy_into, flat_bytes
from adaptra.runtime.transports.staging.room import Room

logger = logging.getLogger(__name__)

_JOIN_SECONDS: Final = 5.0


class HostMessage(Protocol):
    """A message in pinned host memory.

    Attributes:
        specs: One per tensor.
        flat: All tensors, (bytes,) uint8.
        views: The tensors as they travel, views of ``flat``.
    """

    specs: MessageSpec
    flat: Tensor
    views: list[Tensor]


class Staging:
    """Copies for one rank.

    Args:
        device: A CUDA device.
        name: A prefix of the threads' names.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._sends, self._arrivals = _Direction(device, f"{name} sends"), _Direction(device, f"{name} arrivals")
        with torch.cuda.stream(self._sends.stream):
            reason = pack.why_not(self._sends.stream.device)
        if reason is not None:
            logger.info("%s: tensors are copied to the host one by one: %s", name, reason)
        self._packs = reason is None
        self._pinned: dict[int, _C.Memory] = {}
        self._lock = threading.Lock()

    def pin(self, memory: _C.Memory) -> None:
        """Register engine memory with CUDA, once; it is kept until :meth:`close`.

        Raises:
            LaunchError: CUDA refuses.
        """
        with self._lock:
            if memory.address in self._pinned:
                return
            status = int(_runtime().cudaHostRegister(memory.address, len(memory), 0))
            if status != 0:
                raise LaunchError(f"CUDA can't register {len(memory)} bytes of host memory: error {status}")
            self._pinned[memory.address] = memory

    def compile_for(self, specs: MessageSpec) -> None:
        """Compile what packs a message of such tensors, if they are contiguous, for which its first packing would wait."""
        with torch.cuda.stream(self._sends.stream), torch.no_grad():
            here = self._sends.stream.device
            tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=here) for spec in specs]
            if self._packs and pack.is_worthwhile(tensors, specs, here):
                pack.pack(torch.empty(flat_bytes(specs), dtype=torch.uint8, device=here), tensors, specs)

    def to_host(self, message: HostMessage, tensors: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Start to copy ``tensors`` into a message in pinned memory.

        Returns:
            An event that is done when the copy is; None for tensors of the host, which are copied at once.
        """
        if not any(tensor.is_cuda for tensor in tensors):
            copy_into(message.views, tensors)
            return None
        stream = self._sends.stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), torch.no_grad():
            here = stream.device
            if self._packs and pack.is_worthwhile(tensors, message.specs, here):
                # Made and used on the copy stream only, so its memory is not reused before the copy has ended.
                flat = torch.empty(message.flat.numel(), dtype=torch.uint8, device=here)
                pack.pack(flat, tensors, message.specs)
                message.flat.copy_(flat, non_blocking=True)
            else:
                # Those of the host are copied at once.
                for view, tensor in sorted(zip(message.views, tensors, strict=True), key=lambda pair: pair[1].is_cuda):
                    view.copy_(tensor, non_blocking=True)
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return recorded(self._sends.stream)

    def make_room(self, specs: MessageSpec) -> Room:
        """Allocate device memory for a received message."""
        return Room(specs, self._device, self._arrivals.stream)

    def to_device(self, message: HostMessage, room: Room) -> torch.cuda.Event:
        """Start to copy a message to its room, which :meth:`.room.Room.wait` has found free.

        Returns:
            The event that a stream must wait for before it uses the room's tensors.
        """
        with torch.cuda.stream(self._arrivals.stream), torch.no_grad():
            room.flat.copy_(message.flat, non_blocking=True)
            for wide, narrow in room.widened:
                wide.copy_(narrow)
        return recorded(self._arrivals.stream)

    def tensors_of(self, message: HostMessage, room: Room, specs: MessageSpec) -> tuple[Tensor, ...]:
        """Return the tensors of a message that goes to a room; those that stay on the host are views of the message."""
        places = zip(specs, message.views, room.tensors, strict=True)
        return tuple((view if spec.stays_on_host else tensor).detach() for spec, view, tensor in places)

    def hand_over(self, room: Room, copied: torch.cuda.Event) -> None:
        """Let the present stream use a room's tensors as soon as their copy has ended, without blocking the host."""
        room.stream = torch.cuda.current_stream(self._device)
        room.stream.wait_event(copied)

    def leave(self, room: Room) -> None:
        """Let a room be filled again once the device has done what was queued for it, and has copied what is sent of it."""
        if room.stream is not None:
            room.read = (recorded(room.stream), recorded(self._sends.stream))
            room.stream = None

    def after_send(self, copied: torch.cuda.Event | None, action: Callable[[], None]) -> None:
        """Call ``action`` once the copy to the host has ended, if there is one, after all earlier actions of that direction."""
        self._sends.then(copied, action)

    def after_arrival(self, copied: torch.cuda.Event, action: Callable[[], None]) -> None:
        """Call ``action`` once the copy to the device has ended, after all earlier actions of that direction."""
        self._arrivals.then(copied, action)

    def close(self) -> None:
        """End the threads after their pending actions, and unpin the memory."""
        for direction in (self._sends, self._arrivals):
            direction.close()
        with self._lock:
            for address in self._pinned:
                _runtime().cudaHostUnregister(address)
            self._pinned = {}


class _Direction:
    """The stream of all copies one way, and the thread of what is done after each."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.stream: Final = torch.cuda.Stream(device)
        self._queue: queue.SimpleQueue[tuple[torch.cuda.Event | None, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def then(self, copied: torch.cuda.Event | None, action: Callable[[], None]) -> None:
        """Call ``action`` once the copy has ended, if there is one, after all earlier actions."""
        self._queue.put((copied, action))

    def close(self) -> None:
        """End the thread after its pending actions."""
        self._queue.put(None)
        self._thread.join(_JOIN_SECONDS)
        self.stream.synchronize()

    def _run(self) -> None:
        torch.cuda.set_device(self.stream.device)  # each thread has a current device of its own
        while (asked := self._queue.get()) is not None:
            copied, action = asked
            if copied is not None:
                copied.synchronize()
            action()


def _runtime() -> Any:
    """Return the CUDA runtime's functions. torch's annotations call them optional, but they exist wherever there is a
    stream.
    """
    return torch.cuda.cudart()
