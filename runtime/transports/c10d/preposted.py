"""The posted receives of a channel, some of them ahead, so that the first messages of a step need not wait for the receiver.

Over gloo a send starts only once its receive is posted. A receive posted at the beginning of a step would delay the first
message by the link's latency back, and with it all that follow. But all messages of a channel have arrived long before the step
ends, so the next step's first receives are posted then.

A receive belongs to no message before something has come: what comes may be of an earlier attempt, and is dropped then. The
first part of a message has one size for all messages, so it has memory of its own here. The second part goes into a buffer of
the pool, for a message of the same layout.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import Work

from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.transports.base import Identity, MessageLayout, layout_of
from adaptra.runtime.transports.message_format import (
    HEADER_BYTES,
    INLINE_BYTES,
    Arrival,
    Header,
    MessageBuffer,
    flat_bytes,
)
from adaptra.runtime.transports.pool import Pool

FIRST_TAG: Final = 0
"""The tag of every message's first part; :attr:`.message_format.MessageBuffer.tag` is that of its second part."""


T = TypeVar("T")


class Dropped(NamedTuple):
    """The second part of a message that is dropped.

    Attributes:
        work: Its receive.
        memory: Where it goes.
        end: Called once it has come.
    """

    work: Work
    memory: Tensor
    end: Callable[[], None]


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
        self._firsts: deque[tuple[Work | None, Tensor]] = deque()
        self._seconds: dict[int, deque[tuple[Work, MessageBuffer]]] = defaultdict(deque)
        self._tags: dict[MessageLayout, int | None] = {}
        # By tag: the receives that are posted, or will be once one that is under way has ended; and those that are asked for.
        self._posted: Counter[int] = Counter()
        self._asked: Counter[int] = Counter()

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
        while self._posted[FIRST_TAG] - self._asked[FIRST_TAG] < count:
            self._post_first()
        tag = self._second_tag(like.specs)
        while tag is not None and self._posted[tag] - self._asked[tag] < count and self._pool.has_free(self._rank, like):
            self._post_second(tag, self._pool.take(self._rank, like))

    def ask(self, identity: Identity, into: Tensor | None = None) -> MessageBuffer | None:
        """Post what is missing for one more message.

        Args:
            identity: The message.
            into: As of :meth:`Transport.receive`. On its channel no message stands by.

        Returns:
            The buffer of a message of one part. That of one of two parts is known once it comes: see :meth:`take`.

        Raises:
            AssertionError: No buffer is left.
        """
        self._wanted = None
        tag = self._second_tag(identity.specs)
        buffer: MessageBuffer | None = None
        if into is not None:
            buffer = MessageBuffer(identity.specs, where=into)
        elif tag is None or self._posted[tag] == self._asked[tag]:
            buffer = self._pool.take(self._rank, identity)
        self._asked[FIRST_TAG] += 1
        if self._posted[FIRST_TAG] < self._asked[FIRST_TAG]:
            self._post_first()
        if tag is None:
            return buffer
        self._asked[tag] += 1
        if buffer is not None:
            self._post_second(tag, buffer)
        return None

    def oldest(self) -> tuple[Work | None, Tensor]:
        """Return the receive that the channel's next message completes, None if it has, and the memory of its first part."""
        return self._firsts[0]

    def arrived(self) -> None:
        """Take note that the oldest receive has completed. gloo would wait for another message at a second wait."""
        self._firsts[0] = (None, self._firsts[0][1])

    def take(self, identity: Identity, buffer: MessageBuffer | None) -> tuple[MessageBuffer, Work | None]:
        """Take the oldest receive, which has completed, for a message that was asked for.

        Args:
            identity: The message.
            buffer: As :meth:`ask` returned it.

        Returns:
            The buffer that has the message's header, and the receive of its second part.
        """
        _, landing = self._pop(self._firsts, FIRST_TAG)
        tag, second = self._second_tag(identity.specs), None
        self._asked[FIRST_TAG] -= 1
        if tag is not None:
            self._asked[tag] -= 1
            second, buffer = self._pop(self._seconds[tag], tag)
        assert buffer is not None, "a message of one part has a buffer since it was asked for"
        buffer.first.copy_(landing)
        self._spare.append(landing)
        return buffer, second

    def drop(self, header: Arrival) -> Dropped | None:
        """Drop the message that the oldest receive got, and post another one.

        Returns:
            The rest of it; None if it has one part.
        """
        _, landing = self._pop(self._firsts, FIRST_TAG)
        self._spare.append(landing)
        self._post_first()
        if header.size <= INLINE_BYTES:
            return None
        if not self._seconds[header.tag]:
            memory = torch.empty(header.size, dtype=torch.uint8, device="cpu")
            return Dropped(self._post(memory, header.tag), memory, lambda: None)
        # It is posted again once it has completed, so it still counts as posted.
        second, buffer = self._seconds[header.tag].popleft()
        assert buffer.rest is not None, "a message of two parts"
        return Dropped(second, buffer.rest, lambda: self._post_into(header.tag, buffer))

    def begin(self) -> None:
        """Begin another attempt: nothing is asked for."""
        self._asked.clear()
        self._wanted = None

    def _second_tag(self, specs: MessageSpec) -> int | None:
        """Return the tag of the second part of messages with these specs; None if they have one part."""
        layout = layout_of(specs)
        if layout not in self._tags:
            self._tags[layout] = Header(specs).tag if flat_bytes(specs) > INLINE_BYTES else None
        return self._tags[layout]

    def _pop(self, receives: deque[T], tag: int) -> T:
        self._posted[tag] -= 1
        return receives.popleft()

    def _post_first(self) -> None:
        size = HEADER_BYTES + INLINE_BYTES
        memory = self._spare.pop() if self._spare else torch.empty(size, dtype=torch.uint8, device="cpu")
        self._firsts.append((self._post(memory, FIRST_TAG), memory))
        self._posted[FIRST_TAG] += 1

    def _post_second(self, tag: int, buffer: MessageBuffer) -> None:
        self._post_into(tag, buffer)
        self._posted[tag] += 1

    def _post_into(self, tag: int, buffer: MessageBuffer) -> None:
        assert buffer.rest is not None, "a message of two parts"
        self._seconds[tag].append((self._post(buffer.rest, tag), buffer))
