"""A message under way in the engine, as its sender or its receiver waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from adaptra import _C
from adaptra.errors import TransportError
from adaptra.runtime.transports.base import Identity, now
from adaptra.runtime.transports.delegate.engine_memory import EngineMessage
from adaptra.runtime.transports.pending import Completion, wait_for
from adaptra.runtime.transports.staging.room import Room


class EnginePending(Completion):
    """A message that the engine sends or receives."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity)
        self.request: _C.Request | None = None
        self.peer = -1
        """The rank at the other end, once it is begun."""
        self.source_rank: int | None = None
        """The rank that sends the message, from the post of its receive until its release; None for a send."""
        self.into: Tensor | None = None
        """As of :meth:`Transport.receive`."""
        self._settle: Callable[[EnginePending], None] | None = None
        self.message: EngineMessage | None = None
        self.room: Room | None = None
        """The device memory of a received message, if it goes to a device."""
        self._begun = threading.Event()

    def begin(self, settle: Callable[[EnginePending], None], request: _C.Request) -> None:
        """Attach the engine's request; ``settle`` completes or fails this pending once the request is done."""
        self._settle, self.request = settle, request
        if super().done:  # the transport ended in between
            request.cancel("the transport ended")
        self._begun.set()

    @property
    def done(self) -> bool:
        """True if :meth:`wait` returns or raises at once."""
        return super().done or (self.request is not None and self.request.done)

    def fail(self, error: Exception) -> None:
        """See :meth:`Completion.fail`. Also ends waits for the engine."""
        super().fail(error)
        if self.request is not None:
            self.request.cancel(str(error))
        self._begun.set()

    def wait(self, timeout: float | None = None) -> tuple[Tensor, ...]:
        """See :meth:`Pending.wait`."""
        if not super().done:
            deadline = None if timeout is None else now() + timeout
            # A send begins once its tensors are copied.
            is_begun = wait_for(self._begun, timeout)
            left = None if deadline is None else max(0.0, deadline - now())
            if not is_begun or (self.request is not None and not self.request.wait(left)):
                raise TransportError(f"{self.identity}: not exchanged within {timeout} s")
            if self._settle is not None:
                self._settle(self)
        return super().wait(0)
