"""A stream of a rank's parameters and buffers to another rank, with constant memory whatever the size of the state.

The stream is the length of a JSON object, the object, which describes the tensors, and the bytes of all tensors in that order.
It travels in messages of one size, a few at a time. So neither side needs more memory than these messages beside the state
itself. The object is checked field by field, and nothing in it is executed.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from adaptra.errors import ControlError
from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.json_files import Fields
from adaptra.runtime.control_store.schema import MAX_BYTES, decode
from adaptra.runtime.exchange.tensor_memory import TensorForm
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport

MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""The size of a message: small compared with a stage, and large enough that the cost per message is negligible."""

UNDER_WAY: Final = 4
"""The number of messages under way at a time; on a link of 1 Gb/s they fill a round trip of 130 ms."""

SPEC: Final[MessageSpec] = (TensorSpec((MESSAGE_BYTES,), torch.uint8),)

_LENGTH_BYTES: Final = 8


class StateStream:
    """One rank's end of a stream. Used by the thread that runs the steps, between two of them.

    Args:
        transport: Carries the messages.
        step: The last step that was run; it names the messages.
        timeout: The timeout of a message, seconds.
        purpose: The purpose of the messages.
    """

    def __init__(self, transport: Transport, step: int, timeout: float, purpose: Purpose = Purpose.MODEL_STATE) -> None:
        self._transport = transport
        self._step = step
        self._timeout = timeout
        self._purpose = purpose

    def send(self, destination: int, state: Mapping[str, Tensor], first_timeout: float) -> None:
        """Send a state to a rank, and return when it has left.

        Args:
            destination: The rank that calls :meth:`receive`.
            state: Tensors by name.
            first_timeout: The timeout in seconds until the first message is taken, since the other rank may receive from others
                first.

        Raises:
            TransportError: It could not be sent.
        """
        under_way: deque[Pending] = deque()
        for index, message in enumerate(_messages(state)):
            if len(under_way) == UNDER_WAY:
                under_way.popleft().wait(first_timeout if index == UNDER_WAY else self._timeout)
            identity = self._identity(self._transport.rank, destination, index)
            under_way.append(self._transport.send(destination, identity, (message,)))
        for pending in under_way:
            pending.wait(first_timeout)

    def receive(self, source: int) -> dict[str, Tensor]:
        """Receive the state that a rank sends, in CPU memory. The transport has :data:`UNDER_WAY` buffers of :data:`SPEC`
        reserved.

        Raises:
            ControlError: The bytes are not a state.
            TransportError: It did not arrive.
        """
        incoming = _Incoming(
            self._transport, source, lambda index: self._identity(source, self._transport.rank, index), self._timeout
        )
        incoming.expect(_LENGTH_BYTES)
        length = int.from_bytes(incoming.take(_LENGTH_BYTES), "little")
        where = f"{self._purpose.value} of rank {source}"
        if length > MAX_BYTES:
            raise ControlError(f"{where}: described by {length} bytes: expected at most {MAX_BYTES}")
        incoming.expect(length)
        fields = decode(incoming.take(length), where)
        forms = dict(_described(fields, item) for item in fields.items("tensors"))
        fields.end()
        incoming.expect(sum(form.nbytes for form in forms.values()))
        bodies = {name: torch.empty(form.nbytes, dtype=torch.uint8) for name, form in forms.items()}
        for body in bodies.values():
            incoming.fill(body)
        incoming.end()
        return {name: form.unpack(bodies[name]) for name, form in forms.items()}

    def _identity(self, source: int, destination: int, index: int) -> Identity:
        return Identity(self._step, self._purpose, source, destination, index, SPEC)


class _Incoming:
    """The bytes of a stream, in the order in which they were sent."""

    def __init__(self, transport: Transport, source: int, identity: Callable[[int], Identity], timeout: float) -> None:
        self._transport = transport
        self._source = source
        self._identity = identity
        self._timeout = timeout
        self._posted: deque[Pending] = deque()
        self._count = 0
        self._expected = 0
        self._held: Pending | None = None
        self._message = torch.empty(0, dtype=torch.uint8)

    def expect(self, count: int) -> None:
        """Expect ``count`` more bytes."""
        self._expected += count
        self._post()

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        found = torch.empty(count, dtype=torch.uint8)
        self.fill(found)
        return found.numpy().tobytes()

    def fill(self, wanted: Tensor) -> None:
        """Copy the next bytes to ``wanted``."""
        done = 0
        while done < len(wanted):
            if not len(self._message):
                self._next()
            part = self._message[: len(wanted) - done]
            wanted[done : done + len(part)] = part
            self._message = self._message[len(part) :]
            done += len(part)

    def end(self) -> None:
        """Release the current message, all of which has been used."""
        if self._held is not None:
            self._transport.release(self._held)
            self._held = None

    def _next(self) -> None:
        self.end()
        self._post()
        self._held = self._posted.popleft()
        self._message = self._held.wait(self._timeout)[0].cpu()

    def _post(self) -> None:
        while len(self._posted) + (self._held is not None) < UNDER_WAY and self._count * MESSAGE_BYTES < self._expected:
            self._posted.append(self._transport.receive(self._source, self._identity(self._count)))
            self._count += 1


def _messages(state: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the stream of a state, cut into messages; the last one is padded."""
    forms = {name: TensorForm.dense(tensor) for name, tensor in state.items()}
    head = json.dumps({"tensors": [[name, form.told()] for name, form in forms.items()]}).encode()

    def parts() -> Iterator[Tensor]:
        yield torch.frombuffer(bytearray(len(head).to_bytes(_LENGTH_BYTES, "little") + head), dtype=torch.uint8)
        for name, tensor in state.items():
            yield forms[name].pack(tensor)

    message, filled = torch.empty(MESSAGE_BYTES, dtype=torch.uint8), 0
    for part in parts():
        done = 0
        while done < len(part):
            taken = part[done : done + MESSAGE_BYTES - filled]
            message[filled : filled + len(taken)] = taken
            done += len(taken)
            filled += len(taken)
            if filled == MESSAGE_BYTES:
                yield message
                message, filled = torch.empty(MESSAGE_BYTES, dtype=torch.uint8), 0
    if filled:
        yield message


def _described(fields: Fields, item: object) -> tuple[str, TensorForm]:
    """Return the name of a tensor and its form."""
    match item:
        case [str(name), told]:
            return name, TensorForm.read(fields, "tensors", told)
        case _:
            raise fields.refuse("tensors", "a name and a form", item)
