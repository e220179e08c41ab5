"""The format of a message in memory and on the wire: a header with its identity, then its tensors in one flat buffer.

A message travels in one or two parts. The first part has the same size for all messages: the header, and room for tensors that
fit into :data:`INLINE_BYTES`. Larger tensors are the second part. So a small message is one operation of the transport. A
receiver that finds another message than expected never has to read its tensors, which may exceed the buffer. Every tensor
begins at a multiple of :data:`ALIGNMENT` bytes. Nothing in a message is executed or unpickled.

The header is :data:`HEADER_BYTES` long, little-endian::

    field       bytes  meaning
    magic       4      adpt
    version     1      6
    purpose     1      index in adaptra.runtime.transports.base.Purpose
    replica     2
    step        8      signed
    source      4      sending stage
    destination 4      receiving stage
    microbatch  4      signed
    sent at     8      double, the sender's time.monotonic seconds
    digest      16     of shapes and dtypes
    length      2      of the text
    shape       4      code of the batch's shape, 0 for that of the compilation
    epoch       4      of the world
    attempt     4      at the world's calls
    size        8      bytes of the tensors in the flat buffer
    span        4      of a part of a sum: the first replica, and the one behind the last
    text        114    shapes and dtypes for people, or what a sum adds, cut to fit
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from adaptra.errors import TransportError
from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.transports.base import Identity, Purpose, describe_layout, layout_of, name_of, now
from adaptra.runtime.world.world import Attempt

ALIGNMENT: Final = 64
HEADER_BYTES: Final = 192
INLINE_BYTES: Final = 4096
VERSION: Final = 6
_MAGIC: Final = b"adpt"
_FORMAT: Final = struct.Struct("<4sBBHqiiid16sHIIIQHH114s")
_PURPOSES: Final = tuple(Purpose)
_CODES: Final = {purpose: code for code, purpose in enumerate(_PURPOSES)}
_TEXT_BYTES: Final = 114


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def shared_memory(size: int, *, is_pinned: bool) -> tuple[memoryview, Tensor]:
    """Allocate aligned host memory, and return it as bytes and as a uint8 tensor."""
    if is_pinned:
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return memoryview((ctypes.c_ubyte * size).from_address(pinned.data_ptr())).cast("B"), pinned
    memory = bytearray(size + ALIGNMENT)
    skipped = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % ALIGNMENT
    return memoryview(memory)[skipped : skipped + size], torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=skipped)


class Header:
    """The header of messages of given specs: writes headers, and compares received ones with the expected ones.

    Args:
        specs: One per tensor.
        size: The bytes that travel behind the first part; None for those of a flat buffer.
    """

    def __init__(self, specs: MessageSpec, size: int | None = None) -> None:
        described = describe_layout(layout_of(specs)).encode()
        self._digest = hashlib.blake2b(described, digest_size=16).digest()
        self._text = described[:_TEXT_BYTES]
        self._size = flat_bytes(specs) if size is None else size
        self.tag = _tag_of(self._digest)

    def pack_into(self, memory: memoryview, identity: Identity, attempt: Attempt, sent_at: float) -> None:
        """Write the header of a message to the first :data:`HEADER_BYTES` of ``memory``."""
        step, purpose, source, destination, microbatch, replica, span = identity.key
        text = identity.about.encode()[:_TEXT_BYTES] or self._text
        _FORMAT.pack_into(
            memory,
            0,
            _MAGIC,
            VERSION,
            _CODES[purpose],
            replica,
            step,
            source,
            destination,
            microbatch,
            sent_at,
            self._digest,
            len(text),
            identity.shape,
            *attempt,
            self._size,
            *span,
            text,
        )

    def check(self, memory: memoryview | bytes, expected: Identity) -> float:
        """Read the header at the beginning of ``memory``, of a message of the present attempt.

        Returns:
            The time at which the message was sent, on the sender's clock, seconds.

        Raises:
            TransportError: It is another message; names the edge, the expected message and the received one.
        """
        fields = _FORMAT.unpack_from(memory)
        magic, version, code, replica, step, source, destination, microbatch, sent_at, digest, length, shape, *others = fields
        if magic != _MAGIC or version != VERSION or code >= len(_PURPOSES) or not math.isfinite(sent_at):
            raise TransportError(f"receive of {expected}: got bytes that are no message of version {VERSION}: {magic!r}")
        purpose = _PURPOSES[code]
        *_, first, end, text = others
        said = text[:length].decode(errors="replace")
        if expected.about and shape != expected.shape:
            raise TransportError(f"{said}; {expected.about}: {OTHER_SUM}")
        other_shape = OTHER_SHAPE if shape != expected.shape else ""
        key = (step, purpose, source, destination, microbatch, replica, (first, end))
        if other_shape or key != expected.key or digest != self._digest:
            got = f"{name_of(purpose, source, microbatch, replica, (first, end))} of step {step} on edge {source}→{destination}"
            raise TransportError(f"receive of {expected}: got {got} with {said}{other_shape}")
        return sent_at


class Arrival(NamedTuple):
    """What a receiver reads of a header before it knows whether it wants the message.

    Attributes:
        attempt: The attempt in which the message was sent.
        size: The bytes of its tensors in the flat buffer.
        tag: As :attr:`Header.tag`.
    """

    attempt: Attempt
    size: int
    tag: int


def arrival(memory: memoryview | bytes) -> Arrival | None:
    """Return what the header at the beginning of ``memory`` says of its message; None if it is no header of this version."""
    magic, version, *_, digest, _, _, epoch, number, size, _, _, _ = _FORMAT.unpack_from(memory)
    if magic != _MAGIC or version != VERSION:
        return None
    return Arrival(Attempt(epoch, number), size, _tag_of(digest))


def _tag_of(digest: bytes) -> int:
    return 1 + int.from_bytes(digest[:4], "little") % (MOST_TAGS - 2)


MOST_TAGS: Final = 2**30
"""The number of tags of messages. A transport can so tell two classes of channels apart that share its tags."""


OTHER_SHAPE: Final = ", of a batch of another shape: expected batches of one shape on all ranks of a replica"
"""The end of the error of a message whose batch has another shape on the sending rank than here."""

OTHER_SUM: Final = "expected the same on all replicas of a stage"
"""The end of the error of a part of another sum than this rank's."""


def flat_bytes(specs: MessageSpec) -> int:
    """Return the number of bytes that the tensors of a message take in one flat buffer."""
    return sum(_aligned(spec.travelling_bytes) for spec in specs)


def views_of(flat: Tensor, specs: MessageSpec) -> list[Tensor]:
    """Return the tensors of a message in the form in which they travel, as views of ``flat`` without a copy.

    ``flat`` has at least :func:`flat_bytes` elements of uint8.
    """
    views: list[Tensor] = []
    offset = 0
    for spec in specs:
        size = spec.travelling_bytes
        views.append(flat[offset : offset + size].view(spec.travels_as).view(spec.shape))
        offset += _aligned(size)
    return views


def copy_into(views: Sequence[Tensor], tensors: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Copy tensors into a message, whose views of them are given."""
    with torch.no_grad():
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor, non_blocking=non_blocking)


class MessageBuffer:
    """The host's memory of one message of given specs, with the views of its tensors.

    Args:
        specs: One per tensor.
        is_pinned: Whether a GPU copies to and from the memory, which is the host's.
        where: The message's only tensor, contiguous and in host memory: where it is too large for the first part, it travels
            from or to there. None if the buffer has memory of its own.

    Attributes:
        specs: One per tensor.
        is_own: Whether all memory is the buffer's own.
        first: The first part, (HEADER_BYTES + INLINE_BYTES,) uint8: the header, and small tensors.
        rest: The tensors, uint8, if they are too large for the first part; else None.
        flat: All tensors, (bytes,) uint8, a view of either part.
        views: The tensors as they travel, views of ``flat``.
    """

    def __init__(self, specs: MessageSpec, *, is_pinned: bool = False, where: Tensor | None = None) -> None:
        self.specs = specs
        self._rule = Header(specs, None if where is None else where.nbytes)
        self._header, self.first = shared_memory(HEADER_BYTES + INLINE_BYTES, is_pinned=is_pinned)
        total = flat_bytes(specs)
        is_large = total > INLINE_BYTES
        self.is_own = where is None or not is_large
        if not is_large:
            self.rest = None
        elif where is not None:
            self.rest = where.view(torch.uint8)
        else:
            self.rest = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        self.flat = self.first[HEADER_BYTES : HEADER_BYTES + total] if self.rest is None else self.rest
        self.views = views_of(self.flat, specs)

    @property
    def tag(self) -> int:
        """A tag for the second part that only messages of the same layout share; never 0, the first part's."""
        return self._rule.tag

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy a message's tensors into the buffer."""
        copy_into(self.views, tensors)

    def seal(self, identity: Identity, attempt: Attempt, sent_at: float | None) -> None:
        """Write the header of the message whose tensors are in the buffer; it is sent now if ``sent_at`` is None."""
        self._rule.pack_into(self._header, identity, attempt, now() if sent_at is None else sent_at)

    def check(self, expected: Identity) -> float:
        """Read the received header.

        Returns:
            The time at which the message was sent, on the sender's clock, seconds.

        Raises:
            TransportError: It is another message; names the edge, the expected message and the received one.
        """
        return self._rule.check(self._header, expected)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of a received message, views of this buffer if they were not rounded."""
        return tuple(view.detach().to(spec.dtype) for view, spec in zip(self.views, self.specs, strict=True))
