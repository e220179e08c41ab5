"""The engine's memory as Python sees it, and the comparison of two ranks' clocks through it before any message."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

import torch
from torch.distributed import Store

from adaptra import _C
from adaptra.errors import LaunchError, TransportError
from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.transports import clock_offset as clock
from adaptra.runtime.transports.base import ChannelClass, MessageLayout, layout_of, now
from adaptra.runtime.transports.message_format import HEADER_BYTES, Header, flat_bytes, views_of

_READING: Final = struct.Struct("<d")
_SECONDS: Final = 30.0


class EngineMessage:
    """Memory of the engine as a message of given specs: a header, then the tensors in one flat buffer.

    Attributes:
        memory: The memory, as long as the message.
        specs: One per tensor.
        rule: Writes and checks the header.
        header: The memory as bytes.
        flat: All tensors, (bytes,) uint8, a view of the memory, which it keeps alive.
        views: The tensors as they travel, views of ``flat``.
    """

    def __init__(self, memory: _C.Memory, specs: MessageSpec) -> None:
        self.memory = memory
        self.specs = specs
        self.rule = Header(specs)
        array = (ctypes.c_ubyte * len(memory)).from_address(memory.address)
        # The tensors keep the array alive, and the array the memory.
        array.owner = memory  # pyright: ignore[reportAttributeAccessIssue] - any attribute may be set
        self.header = memoryview(array).cast("B")
        self.flat = torch.frombuffer(array, dtype=torch.uint8)[HEADER_BYTES : HEADER_BYTES + flat_bytes(specs)]
        self.views = views_of(self.flat, specs)


class EngineMessages:
    """The messages that one rank's engine has memory for. Those that were sent are used again.

    Args:
        engine: Allocates the memory.
        make: Makes a message in memory.
    """

    def __init__(self, engine: _C.Engine, make: Callable[[_C.Memory, MessageSpec], EngineMessage]) -> None:
        self._engine = engine
        self._make = make
        self._lock = threading.Lock()
        self._free: dict[MessageLayout, list[EngineMessage]] = {}
        self._arrived: dict[tuple[int, MessageLayout], EngineMessage] = {}
        self._made: Counter[MessageLayout] = Counter()

    def free(self, specs: MessageSpec) -> EngineMessage:
        """Return a message to be sent, in memory of its own."""
        with self._lock:
            free = self._free.get(layout_of(specs))
            if free:
                return free.pop()
            self._made[layout_of(specs)] += 1
        return self._new(specs)

    def provide(self, specs: MessageSpec, count: int) -> None:
        """Make messages to be sent until there are as many of this layout, used and free."""
        with self._lock:
            missing = count - self._made[layout_of(specs)]
            self._made[layout_of(specs)] += max(0, missing)
        for _ in range(missing):
            self.recycle(self._new(specs))

    def _new(self, specs: MessageSpec) -> EngineMessage:
        return self._make(self._engine.allocate(HEADER_BYTES + flat_bytes(specs)), specs)

    def recycle(self, message: EngineMessage) -> None:
        """Use a message again, because it was sent."""
        with self._lock:
            self._free.setdefault(layout_of(message.specs), []).append(message)

    def at(self, memory: _C.Memory, specs: MessageSpec) -> EngineMessage:
        """Return the message that arrived in this memory."""
        key = (memory.address, layout_of(specs))
        message = self._arrived.get(key)
        if message is None:
            message = self._arrived[key] = self._make(memory, specs)
        return message

    def clear(self) -> None:
        """Forget all messages, and with them the views of the engine's memory."""
        with self._lock:
            self._free.clear()
            self._arrived.clear()


class _Pair:
    """Exchanges readings of a clock with one other rank, one at a time."""

    def __init__(self, engine: _C.Engine, peer: int, out: ChannelClass, back: ChannelClass) -> None:
        self._engine = engine
        self._peer = peer
        self._out = out
        self._back = back
        self._memory = engine.allocate(_READING.size)
        self._cell = (ctypes.c_ubyte * _READING.size).from_address(self._memory.address)
        engine.reserve(peer, _READING.size, 1)

    def send(self, value: float) -> None:
        _READING.pack_into(self._cell, 0, value)
        self._await(self._engine.send(self._peer, self._out, self._memory, _READING.size, now()))

    def receive(self) -> float:
        request = self._engine.receive(self._peer, self._back, _READING.size)
        self._await(request)
        memory = request.memory
        assert memory is not None, "an arrived message lies somewhere"
        (value,) = _READING.unpack(ctypes.string_at(memory.address, _READING.size))
        self._engine.release(request)
        return float(value)

    def _await(self, request: _C.Request) -> None:
        if not request.wait(_SECONDS) or request.error is not None:
            reason = request.error or f"nothing came within {_SECONDS:g} s"
            text = f"can't compare clocks with rank {self._peer} over the delegate: {reason}"
            raise LaunchError(text) from TransportError(reason)


def compare_clocks(engine: _C.Engine, rank: int, world_size: int, store: Store) -> tuple[clock.Offset, ...]:
    """Measure how far every rank's clock is ahead of this one's, over the engine from neighbour to neighbour.

    Raises:
        LaunchError: A neighbour can't be reached.
    """
    if rank > 0:
        lower = _Pair(engine, rank - 1, ChannelClass.BACKWARD, ChannelClass.FORWARD)
        clock.answer(lower.send, lower.receive)
    to_next: clock.Offset | None = None
    if rank + 1 < world_size:
        upper = _Pair(engine, rank + 1, ChannelClass.FORWARD, ChannelClass.BACKWARD)
        to_next = clock.initiate(upper.send, upper.receive)
    return clock.share(store, rank, world_size, to_next)
