"""One rank's end of a directed edge: a communicator and a stream that only this edge uses, and two threads.

A thread starts the messages in their order, another waits for their ends. So whoever hands a message over never waits, and no
edge waits for another one. A thread waits for an event of its own edge's stream, asks whether the operation succeeded, and only
then looks at what arrived.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Work

from adaptra.errors import TransportError
from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.devices.events import recorded
from adaptra.runtime.transports.base import MessageLayout, layout_of, now
from adaptra.runtime.transports.nccl.communicator import Communicator, failure_of
from adaptra.runtime.transports.nccl.device_message import DeviceMessage
from adaptra.runtime.transports.nccl.edges import Edge
from adaptra.runtime.transports.pending import Completion


class EdgeMessage(NamedTuple):
    """A message that was handed over.

    Attributes:
        pending: What its user waits for.
        message: Its memory.
        filled: Passed once a sent message's tensors are in it; None for one to receive.
        posted_at: The time of the hand-over if that was before, else None; or the time at which a receive was asked for.
    """

    pending: Completion
    message: DeviceMessage
    filled: torch.cuda.Event | None
    posted_at: float | None


class _UnderWay(NamedTuple):
    posted: EdgeMessage
    work: Work
    ended: torch.cuda.Event


class EdgeEnd:
    """One rank's end of an edge in one attempt.

    Args:
        edge: The edge.
        is_source: Whether this rank sends.
        device: The GPU of this rank.
        name: A prefix of the threads' names.
        packs: Whether tensors are packed by one kernel where that is worth it.
        ahead: By how many seconds the other rank's clock is ahead of this one's.
        on_end: Called with a message that has ended, on a thread, and with the reason if it was not exchanged.
    """

    def __init__(
        self,
        edge: Edge,
        is_source: bool,
        device: torch.device,
        name: str,
        packs: bool,
        ahead: float,
        on_end: Callable[[Edge, EdgeMessage, Exception | None], None],
    ) -> None:
        self.edge: Final = edge
        self.is_source: Final = is_source
        self.stream: Final = torch.cuda.Stream(device, priority=-1)
        self._device = device
        self._packs = packs
        self._ahead = ahead
        self._on_end = on_end
        self._unused: dict[MessageLayout, list[DeviceMessage]] = {}
        self._communicator: Communicator | None = None
        self._why_none: Exception | None = None
        self._may_begin = threading.Event()
        self._posted: queue.SimpleQueue[EdgeMessage | None] = queue.SimpleQueue()
        self._under_way: queue.SimpleQueue[_UnderWay | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"{name} {what} {edge}", daemon=True)
            for target, what in ((self._start_all, "starts"), (self._end_all, "ends"))
        ]
        for thread in self._threads:
            thread.start()

    def allocate(self, specs: MessageSpec) -> DeviceMessage:
        """Return new memory for a message, which belongs to the edge's stream."""
        with torch.cuda.stream(self.stream):
            return DeviceMessage(specs, self._device)

    def send(self, pending: Completion, tensors: Sequence[Tensor], posted_at: float | None) -> None:
        """Have the edge's stream copy tensors into a message once the present stream has made them, and hand that over."""
        specs = pending.identity.specs
        unused = self._unused.setdefault(layout_of(specs), [])
        message = unused.pop() if unused else self.allocate(specs)
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            message.fill(tensors, packs=self._packs)
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)
        self.post(EdgeMessage(pending, message, self._recorded(), posted_at))

    def post(self, posted: EdgeMessage) -> None:
        """Hand a message over, to be exchanged after all earlier ones."""
        self._posted.put(posted)

    def begin(self, communicator: Communicator) -> None:
        """Exchange messages over a connected communicator from now on."""
        self._communicator = communicator
        self._may_begin.set()

    def refuse(self, why: Exception) -> None:
        """Fail all messages that are not under way yet."""
        self._why_none = self._why_none or why
        self._may_begin.set()

    def try_out(self, communicator: Communicator) -> None:
        """Exchange a header's bytes, because NCCL connects two devices at their first message; waits for it.

        Raises:
            Exception: The message was not exchanged.
        """
        with torch.cuda.stream(self.stream):
            message = DeviceMessage((), self._device)
            message.memory.zero_()
            work = communicator.send(message.memory) if self.is_source else communicator.receive(message.memory)
            work.wait()
        self._recorded().synchronize()
        if (error := failure_of(work)) is not None:
            raise error

    def close(self) -> None:
        """End the threads behind the messages that were handed over; returns at once."""
        self.refuse(TransportError(f"edge {self.edge} is closed"))
        self._posted.put(None)

    def join(self, seconds: float) -> list[str]:
        """Wait for the threads to end, and return the names of those that have not."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _start_all(self) -> None:
        torch.cuda.set_device(self._device)  # each thread has a current device of its own
        while (posted := self._posted.get()) is not None:
            try:
                if posted.filled is not None:
                    posted.filled.synchronize()
                self._may_begin.wait()
                if self._why_none is not None or self._communicator is None:
                    raise self._why_none or AssertionError("it may begin with one")
                self._under_way.put(self._start(posted, self._communicator))
            except Exception as error:
                self._on_end(self.edge, posted, error)
        self._under_way.put(None)

    def _start(self, posted: EdgeMessage, communicator: Communicator) -> _UnderWay:
        """Put a message on the edge's stream."""
        pending, message, filled, posted_at = posted
        with torch.cuda.stream(self.stream):
            if filled is not None:
                message.write_header(pending.identity, pending.attempt, now() if posted_at is None else posted_at)
                work = communicator.send(message.memory)
                work.wait()
            else:
                if message.free_from is not None:
                    self.stream.wait_event(message.free_from)
                work = communicator.receive(message.memory)
                work.wait()
                message.fetch_header()
        return _UnderWay(posted, work, self._recorded())

    def _end_all(self) -> None:
        torch.cuda.set_device(self._device)
        while (under_way := self._under_way.get()) is not None:
            posted, work, ended = under_way
            try:
                ended.synchronize()
                error = failure_of(work) or self._why_none
                if error is None and posted.filled is None:
                    self._deliver(posted, ended)
                elif error is None:
                    self._unused[layout_of(posted.message.specs)].append(posted.message)
                    posted.pending.complete()
            except Exception as raised:
                error = raised
            self._on_end(self.edge, posted, error)

    def _deliver(self, posted: EdgeMessage, ended: torch.cuda.Event) -> None:
        """Complete a receive by its message, which has arrived.

        Raises:
            TransportError: It is another message than the expected one.
        """
        arrived_at = now()
        pending, message, _, asked_at = posted
        sent_at = message.check(pending.identity) - self._ahead
        with torch.cuda.stream(self.stream):
            tensors = message.tensors()
        pending.use = partial(_hand_over, tensors, self._recorded() if message.is_rounded else ended, self._device)
        assert asked_at is not None, "a receive is asked for at a time"
        pending.complete(tensors, sent_at, arrived_at, asked_at=asked_at)

    def _recorded(self) -> torch.cuda.Event:
        return recorded(self.stream, sleeps=True)


def _hand_over(tensors: Sequence[Tensor], there: torch.cuda.Event, device: torch.device) -> None:
    """Let the present stream use received tensors as soon as they are there, without blocking the host."""
    current = torch.cuda.current_stream(device)
    current.wait_event(there)
    for tensor in tensors:
        tensor.record_stream(current)
