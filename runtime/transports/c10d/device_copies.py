"""Copies between a device and messages in the host's memory, which is pinned if the device is a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.transports.message_format import MessageBuffer
from adaptra.runtime.transports.pending import Completion
from adaptra.runtime.transports.staging.room import Room
from adaptra.runtime.transports.staging.staging import Staging


class DeviceCopies:
    """The copies of one rank.

    Args:
        device: The device of sent and received tensors.
        name: A prefix of threads' names.

    Attributes:
        device: The device of sent and received tensors.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self.device: Final = device
        self._staging = Staging(device, name) if device.type == "cuda" else None
        self._rooms: WeakKeyDictionary[MessageBuffer, Room] = WeakKeyDictionary()

    def allocate(self, specs: MessageSpec) -> MessageBuffer:
        """Return memory for a sent message."""
        return MessageBuffer(specs, is_pinned=self._staging is not None)

    def allocate_received(self, specs: MessageSpec) -> MessageBuffer:
        """Return memory for a received message."""
        buffer = self.allocate(specs)
        if self._staging is not None:
            self._rooms[buffer] = self._staging.make_room(specs)
        return buffer

    def compile_for(self, specs: MessageSpec) -> None:
        """Compile what packs such messages, see :meth:`.staging.Staging.compile_for`."""
        if self._staging is not None:
            self._staging.compile_for(specs)

    def fill(self, buffer: MessageBuffer, tensors: Sequence[Tensor], start: Callable[[], None]) -> None:
        """Copy the tensors of a message into its memory, then ``start`` it.

        That happens later, on another thread, where the host does not wait for the device. Messages start in the order of the
        calls.
        """
        if self._staging is None:
            buffer.fill(tensors)
            start()
            return

        def start_later() -> None:
            with contextlib.suppress(Exception):  # the message's operation has failed by it
                start()

        self._staging.after_send(self._staging.to_host(buffer, tensors), start_later)

    def tensors_of(self, pending: Completion, buffer: MessageBuffer) -> tuple[Tensor, ...]:
        """Return the tensors of a message that arrived, where they are wanted."""
        if self._staging is None or pending.identity.is_for_host:
            return buffer.tensors()
        room = self._rooms[buffer]
        room.wait()
        copied = self._staging.to_device(buffer, room)
        copied.synchronize()  # another message may use the buffer as soon as this one is released
        pending.use = partial(self._staging.hand_over, room, copied)
        return self._staging.tensors_of(buffer, room, pending.identity.specs)

    def leave(self, buffer: MessageBuffer) -> None:
        """Let the memory of a received message be filled again, once the device has done what was queued for it."""
        if self._staging is not None and buffer in self._rooms:
            self._staging.leave(self._rooms[buffer])

    def close(self) -> None:
        """End the copies' threads."""
        if self._staging is not None:
            self._staging.close()
