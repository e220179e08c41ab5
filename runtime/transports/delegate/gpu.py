"""The delegate for tensors on a GPU: its messages are copied to the host and back on a stream of their own.

A sent message is passed to the engine once its copy to the host has ended. A thread per channel copies a received message to
the GPU as soon as it arrives, whatever the rank computes at that time. The compute stream waits for a copy's event; the host
waits for none.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from adaptra import _C
from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.transports.base import ChannelClass, Identity, LaneTraffic, now
from adaptra.runtime.transports.delegate.delegate import DelegateTransport
from adaptra.runtime.transports.delegate.engine import StartedEngine
from adaptra.runtime.transports.delegate.engine_memory import EngineMessage
from adaptra.runtime.transports.delegate.engine_pending import EnginePending
from adaptra.runtime.transports.message_format import HEADER_BYTES, flat_bytes
from adaptra.runtime.transports.pending import Completion
from adaptra.runtime.transports.staging.room import Room
from adaptra.runtime.transports.staging.staging import Staging

_JOIN_SECONDS: Final = 5.0


class _ReceiveToGpu(EnginePending):
    """A receive whose tensors are copied to the GPU on arrival, before any op waits for them."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity)
        self.copied: torch.cuda.Event | None = None

    @property
    def done(self) -> bool:
        """True if :meth:`wait` returns or raises at once."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> tuple[Tensor, ...]:
        """See :meth:`Pending.wait`. The present stream waits for the copy, and the host doesn't."""
        return Completion.wait(self, timeout)


class GpuDelegateTransport(DelegateTransport):
    """One rank's end of the delegate, for tensors on ``device``; see :class:`.delegate.DelegateTransport`."""

    def __init__(self, started: StartedEngine, on_close: Callable[[], None], device: torch.device) -> None:
        super().__init__(started, on_close)
        self._device = device
        self._staging = Staging(device, f"adaptra rank {self.rank}")
        self._stocked: Counter[tuple[int, int]] = Counter()  # slots by source and bytes
        self._prefetched: dict[tuple[int, ChannelClass], queue.SimpleQueue[EnginePending | None]] = {}
        self._prefetchers: list[threading.Thread] = []

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        super().close()
        for prefetched in self._prefetched.values():
            prefetched.put(None)
        for thread in self._prefetchers:
            thread.join(_JOIN_SECONDS)
        self._staging.close()

    def prepare(self, traffic: LaneTraffic) -> None:
        """See :meth:`Transport.prepare`. Pins host memory of the messages, and compiles what packs them."""
        slots: Counter[tuple[int, int]] = Counter()
        for (rank, specs), count in traffic.received.items():
            slots[rank, HEADER_BYTES + flat_bytes(specs)] += count
        with torch.cuda.device(self._device):
            for specs, count in traffic.sent.items():
                self._messages.provide(specs, count)
                self._staging.compile_for(specs)
            for (rank, size), count in slots.items():
                for _ in range(count - self._stocked[rank, size]):
                    memory = self._engine.allocate(size)
                    self._staging.pin(memory)
                    self._engine.stock(memory)
                self._stocked[rank, size] = max(self._stocked[rank, size], count)

    def _arriving_by(self, identity: Identity) -> EnginePending:
        return EnginePending(identity) if identity.is_for_host else _ReceiveToGpu(identity)

    def _make_room(self, specs: MessageSpec) -> Room:
        return self._staging.make_room(specs)

    def _make_message(self, memory: _C.Memory, specs: MessageSpec) -> EngineMessage:
        self._staging.pin(memory)
        return super()._make_message(memory, specs)

    def _fill(self, message: EngineMessage, tensors: Sequence[Tensor], start: Callable[[float], None]) -> None:
        # The host has queued the op that makes the tensors. They are there once the device has run it and copied them.
        self._staging.after_send(self._staging.to_host(message, tensors), lambda: start(now()))

    def _expect(self, pending: EnginePending, source_rank: int) -> None:
        if not isinstance(pending, _ReceiveToGpu):
            return
        channel = (source_rank, pending.identity.channel)
        with self._lock:
            prefetched = self._prefetched.get(channel)
            if prefetched is None:
                prefetched = self._prefetched[channel] = queue.SimpleQueue()
                name = f"adaptra rank {self.rank} prefetch from {source_rank}"
                thread = threading.Thread(target=self._prefetch, args=(prefetched,), name=name, daemon=True)
                self._prefetchers.append(thread)
                thread.start()
        prefetched.put(pending)

    def _prefetch(self, prefetched: queue.SimpleQueue[EnginePending | None]) -> None:
        torch.cuda.set_device(self._device)  # each thread has a current device of its own
        while (pending := prefetched.get()) is not None:
            assert pending.request is not None, "it was posted"
            pending.request.wait(None)
            self.settle(pending)

    def _deliver(self, pending: EnginePending, message: EngineMessage) -> tuple[Tensor, ...]:
        if not isinstance(pending, _ReceiveToGpu):
            return super()._deliver(pending, message)
        assert pending.room is not None, "it has one since its receive was posted"
        pending.room.wait()
        with self._lock:
            if pending.attempt < self._guard.attempt:
                return ()  # a later attempt may give the room to another message
            pending.copied = self._staging.to_device(message, pending.room)
        pending.use = partial(self._staging.hand_over, pending.room, pending.copied)
        return self._staging.tensors_of(message, pending.room, pending.identity.specs)

    def _give_back(self, pending: EnginePending) -> None:
        if pending.room is not None:
            self._staging.leave(pending.room)
        if not isinstance(pending, _ReceiveToGpu):
            super()._give_back(pending)
        elif pending.copied is not None:
            self._staging.after_arrival(pending.copied, lambda: DelegateTransport._give_back(self, pending))
