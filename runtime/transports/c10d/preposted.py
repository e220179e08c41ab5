"""Pre-posted receives, so that the first messages of a step need not wait for the receiver.

Over gloo a send starts only once its receive is posted. A receive posted at the beginning of a step would delay the first
message by the link's latency back, and with it all that follow. But all messages of a channel have arrived long before the step
ends, so the next step's first receives are posted then.

The first part of a message has one size for all messages, so it has memory of its own here. The second part goes into a buffer
of the pool, for a message of the same layout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Work

from adaptra.runtime.transports.base import Identity, MessageLayout, layout_of
from adaptra.runtime.transports.message_format import HEADER_BYTES, INLINE_BYTES, MessageBuffer, flat_bytes
from adaptra.runtime.transports.pool import Pool

FIRST_TAG: Final = 0
"""The tag of every message's first part; :attr:`.message_format.MessageBuffer.tag` is that of its second part."""


class Receives(NamedTuple):
    """The receives of one message.

    Attributes:
        buffer: The buffer of the message.
        works: One per part.
        landing: The memory in which the first part arrives, if not in the buffer.
    """

    buffer: MessageBuffer
    works: tuple[Work, ...]
    landing: Tensor | None


class PrepostedReceives:
    """The receives of one channel. To be used under the transport's lock.

    Args:
        post: Posts a receive into memory under a tag.
        pool: The pool of buffers.
        rank: The rank that sends.
    """

    def __init__(self, post: Callable[[Tensor, int], Work], pool: Pool[MessageBuffer], rank: int) -> None:
        self._post = post
        self._pool = pool
        self._rank = rank
        self._wanted: tuple[Identity, int] | None = None
        self._spare: list[Tensor] = []
        self._firsts: deque[tuple[Work, Tensor]] = deque()
        self._seconds: dict[MessageLayout, deque[tuple[Work, MessageBuffer]]] = {}

    def stand(self, like: Identity, count: int) -> None:
        """Pre-post receives for ``count`` messages of one layout, limited by the free buffers; :meth:`top_up` posts the
        others.
        """
        self._wanted = (like, count)
        self.top_up()

    def top_up(self) -> None:
        """Pre-post missing receives after a buffer became free, unless a message has been requested since."""
        if self._wanted is None:
            return
        like, count = self._wanted
        while len(self._firsts) < count:
            memory = self._spare.pop() if self._spare else torch.empty(HEADER_BYTES + INLINE_BYTES, dtype=torch.uint8)
            self._firsts.append((self._post(memory, FIRST_TAG), memory))
        if flat_bytes(like.specs) > INLINE_BYTES:
            seconds = self._seconds.setdefault(layout_of(like.specs), deque())
            while len(seconds) < count and self._pool.has_free(self._rank, like):
                buffer = self._pool.take(self._rank, like)
                seconds.append((self._post_second(buffer), buffer))

    def receive(self, identity: Identity) -> Receives:
        """Return the receives of the channel's next message: pre-posted ones, and new ones if there are none.

        Raises:
            AssertionError: No buffer is left.
        """
        self._wanted = None
        standing = self._seconds.get(layout_of(identity.specs))
        second, buffer = standing.popleft() if standing else (None, self._pool.take(self._rank, identity))
        first, landing = self._firsts.popleft() if self._firsts else (self._post(buffer.first, FIRST_TAG), None)
        if buffer.rest is None:
            return Receives(buffer, (first,), landing)
        return Receives(buffer, (first, second or self._post_second(buffer)), landing)

    def land(self, landing: Tensor, buffer: MessageBuffer) -> None:
        """Copy the first part of a message, which has arrived in ``landing``, to its buffer."""
        buffer.first.copy_(landing)
        self._spare.append(landing)

    def _post_second(self, buffer: MessageBuffer) -> Work:
        assert buffer.rest is not None, "a message of two parts"
        return self._post(buffer.rest, buffer.tag)
