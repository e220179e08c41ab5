"""Copies between a GPU's memory and the engine's on a separate stream, so that compute waits only for the copies it needs.

The engine's memory is registered with CUDA, so copies to and from it run asynchronously. Actions after a copy, such as sending
a message or refilling a slot, run on one thread that waits for the copy's event. A sent tensor is recorded on the copy stream,
and a received one on the stream that asks for it. So the memory of neither is reused before its copy has ended.

A message of several tensors, or of one that isn't contiguous, is packed on the GPU first where Triton works, see :mod:`.pack`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from adaptra import _C
from adaptra.errors import LaunchError
from adaptra.runtime.devices import pack
from adaptra.runtime.transports.delegate.engine_memory import EngineMessage

logger = logging.getLogger(__name__)

_JOIN_SECONDS: Final = 5.0


class Staging:
    """Copies for one rank.

    Args:
        device: A CUDA device.
        name: A prefix of the thread's name.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            reason = pack.why_not(self._stream.device)
        if reason is not None:
            logger.info("%s: tensors are copied to the host one by one: %s", name, reason)
        self._packs = reason is None
        self._pinned: dict[int, _C.Memory] = {}
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{name} staging", daemon=True)
        self._thread.start()

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

    def to_host(self, message: EngineMessage, tensors: Sequence[Tensor]) -> torch.cuda.Event:
        """Start to copy ``tensors`` into a message in pinned memory.

        Returns:
            An event that is done when the copy is.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            here = self._stream.device
            if self._packs and pack.is_worthwhile(tensors, message.specs) and all(tensor.device == here for tensor in tensors):
                # Made and used on the copy stream only, so its memory is not reused before the copy has ended.
                flat = torch.empty(message.flat.numel(), dtype=torch.uint8, device=here)
                pack.pack(flat, tensors, message.specs)
                message.flat.copy_(flat, non_blocking=True)
            else:
                for view, tensor in zip(message.views, tensors, strict=True):
                    view.copy_(tensor, non_blocking=True)
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
        return self._record()

    def to_device(self, message: EngineMessage) -> tuple[tuple[Tensor, ...], torch.cuda.Event]:
        """Start to copy a message to the device.

        Returns:
            Its tensors, and the event that a stream must wait for before it uses them.
        """
        with torch.cuda.stream(self._stream), torch.no_grad():
            # Rounded tensors are widened on the device.
            tensors = tuple(
                view.to(self._device, non_blocking=True).to(spec.dtype)
                for view, spec in zip(message.views, message.specs, strict=True)
            )
        return tensors, self._record()

    def hand_over(self, tensors: Sequence[Tensor], copied: torch.cuda.Event) -> None:
        """Let the present stream use ``tensors`` as soon as their copy has ended, without blocking the host."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for tensor in tensors:
            tensor.record_stream(current)

    def then(self, copied: torch.cuda.Event, action: Callable[[], None]) -> None:
        """Call ``action`` once the copy has ended, after all earlier actions."""
        self._queue.put((copied, action))

    def close(self) -> None:
        """End the thread after its pending actions, and unpin the memory."""
        self._queue.put(None)
        self._thread.join(_JOIN_SECONDS)
        self._stream.synchronize()
        with self._lock:
            for address in self._pinned:
                _runtime().cudaHostUnregister(address)
            self._pinned = {}

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            copied, action = asked
            copied.synchronize()
            action()


def _runtime() -> Any:
    """Return the CUDA runtime's functions. torch's annotations call them optional, but they exist wherever there is a
    stream.
    """
    return torch.cuda.cudart()
