"""What brings the messages of sums to other replicas: a job's transport, or a process group of torch.distributed."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from adaptra.collectives.rounds import TermMessage
from adaptra.graph.ops.specs import TensorSpec
from adaptra.runtime.devices.read_later import ReadLater
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport
from adaptra.runtime.world.world import WorkerId


class Waited(Protocol):
    """A message that is sent or received."""

    def wait(self) -> object:
        """Wait until it has arrived, or until its memory is no longer needed.

        Raises:
            RuntimeError: It has failed.
        """
        ...


Post = Callable[[TermMessage, Tensor], Waited]
"""Begins to send a message from memory of the host, contiguous, or to receive it there."""


class TransportPosts:
    """Messages of sums over the transport of a job: activations go first, and other paths or the delegate take over.

    Args:
        transport: That of all workers.
        workers: Those of the replicas, in the order of the sum.
        stage: The stage that they have, or the first one of several.

    Attributes:
        sends_whole: Whether a message that has begun is out of reach. The delegate sends pieces, between which others go.
    """

    def __init__(self, transport: Transport, workers: Sequence[WorkerId], stage: int) -> None:
        self.sends_whole: Final = transport.contract.send_waits_for_receiver
        self._transport = transport
        self._workers = tuple(workers)
        self._stage = stage

    def of(self, number: int, text: str, code_with: Callable[[int], int]) -> Post:
        """Return what begins the messages of a sum.

        Args:
            number: Its number, the same on all replicas.
            text: What this replica adds, for those that add something else.
            code_with: Returns for a replica what it has to have found too.
        """
        own, code_with = self._workers.index(WorkerId(self._transport.rank)), lru_cache(code_with)

        def post(message: TermMessage, memory: Tensor) -> Pending:
            is_sent, (part, *span) = message.source == own, message.value
            peer = message.destination if is_sent else message.source
            specs = (TensorSpec(tuple(memory.shape), memory.dtype, stays_on_host=True),)
            edge, replica, code = (self._stage, self._stage), message.source, code_with(peer)
            identity = Identity(number, Purpose.TERM, *edge, part, specs, replica, code, (span[0], span[1]), text)
            if is_sent:
                return self._transport.send(self._workers[peer], identity, [memory])
            return self._transport.receive(self._workers[peer], identity, memory)

        return post


def posts_over(group: Any, tag: int) -> Post:
    """Return what begins messages over a group of gloo.

    Args:
        group: The replicas.
        tag: That of the messages; those of other tags never meet.
    """
    rank = group.rank()

    def post(message: TermMessage, memory: Tensor) -> dist.Work:
        if message.source == rank:
            return group.send([memory], message.destination, tag)
        return group.recv([memory], message.source, tag)

    return post


class _TermUnderWay(NamedTuple):
    """A message under way.

    Attributes:
        message: What it is.
        tensor: The value.
        memory: What is sent or filled: of a value on a GPU a copy in pinned memory.
        work: The operation.
    """

    message: TermMessage
    tensor: Tensor
    memory: Tensor
    work: Waited


class NcclCarrier:
    """The messages of one sum over NCCL, whose operations end in their order: a wait for one is queued on the stream.

    Args:
        group: The replicas.

    Attributes:
        works: Those whose ends were waited for.
    """

    ends_in_order: Final = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: Any = group  # torch's annotations lack some of its methods
        self._rank = group.rank()
        self._under_way = deque[tuple[TermMessage, Tensor, dist.Work | None]]()
        self.works: list[dist.Work] = []

    @property
    def has_ended(self) -> bool:
        """False: that is not known."""
        return False

    def begin(self, messages: Sequence[tuple[TermMessage, Tensor]]) -> None:
        """See :meth:`.moves.Carrier.begin`. NCCL begins a round's messages as one, and gives one work for all of them."""
        group, device = self._group, messages[0][1].device
        pairs = group._get_backend(device).supports_coalescing
        if pairs:
            group._start_coalescing(device)
        receives_first = sorted(messages, key=lambda each: each[0].source == self._rank)
        works = [self._operation(*each) for each in receives_first]
        if pairs:
            works = [group._end_coalescing(device), *[None] * (len(works) - 1)]
        self._under_way += [(*each, work) for each, work in zip(receives_first, works, strict=True)]

    def next(self) -> tuple[TermMessage, Tensor]:
        """See :meth:`.moves.Carrier.next`."""
        message, tensor, work = self._under_way.popleft()
        if work is not None:
            work.wait()
            self.works.append(work)
        return message, tensor

    def _operation(self, message: TermMessage, tensor: Tensor) -> dist.Work:
        if message.source == self._rank:
            return self._group.send([tensor], message.destination, 0)
        return self._group.recv([tensor], message.source, 0)


class HostCarrier:
    """The messages of one sum from host to host, which end in any order. Those of GPUs cross by way of pinned memory.

    Args:
        rank: The replica.
        post: Begins messages.
        waits: What waits for them; None if the calling thread does, for the earliest.

    Attributes:
        ends_in_order: Whether messages end in the same order in each sum of the same messages, as they are told.
    """

    def __init__(self, rank: int, post: Post, waits: Waits | None) -> None:
        self._rank = rank
        self._post = post
        self.ends_in_order: Final = waits is None
        self._waits = waits
        self._under_way: list[tuple[int, int, _TermUnderWay]] = []
        """A heap, by round and then as they began."""
        self._begun = 0
        self._ended: SimpleQueue[tuple[_TermUnderWay, Exception | None]] = SimpleQueue()

    @property
    def has_ended(self) -> bool:
        """See :attr:`.moves.Carrier.has_ended`."""
        return not self._ended.empty()

    def begin(self, messages: Sequence[tuple[TermMessage, Tensor]]) -> None:
        """See :meth:`.moves.Carrier.begin`. The calling thread waits until the value of a GPU is on the host."""
        for message, tensor in messages:
            if message.source == self._rank:
                memory = ReadLater(tensor).wait()
            else:
                memory = torch.empty_like(tensor, device="cpu", pin_memory=True) if tensor.is_cuda else tensor
            under_way = _TermUnderWay(message, tensor, memory, self._post(message, memory))
            if self._waits is None:
                heappush(self._under_way, (message.round, self._begun, under_way))
                self._begun += 1
            else:
                self._waits.add(under_way, self._ended)

    def next(self) -> tuple[TermMessage, Tensor]:
        """See :meth:`.moves.Carrier.next`."""
        ended = self._next()
        if ended.memory is not ended.tensor and ended.message.destination == self._rank:
            ended.tensor.copy_(ended.memory, non_blocking=True)
        return ended.message, ended.tensor

    def _next(self) -> _TermUnderWay:
        if self._waits is None:
            *_, earliest = heappop(self._under_way)
            earliest.work.wait()
            return earliest
        ended, error = self._ended.get()
        if error is not None:
            raise error
        return ended


_Told = SimpleQueue[tuple[_TermUnderWay, Exception | None]]
_Waiting = SimpleQueue[tuple[_TermUnderWay, _Told] | None]


class Waits:
    """Waits for messages, whose ends are told only to threads that wait. So each peer and direction has one.

    The threads end with the last reference.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int], _Waiting] = {}
        weakref.finalize(self, _end, self._lanes)

    def add(self, under_way: _TermUnderWay, told: _Told) -> None:
        """Have the end of a message told, or its error."""
        lane = under_way.message.source, under_way.message.destination
        if lane not in self._lanes:
            self._lanes[lane] = SimpleQueue()
            name = f"adaptra-sum-{lane[0]}-to-{lane[1]}"
            threading.Thread(target=_wait_in_turn, args=(self._lanes[lane],), name=name, daemon=True).start()
        self._lanes[lane].put((under_way, told))


def _wait_in_turn(waiting: _Waiting) -> None:
    while (each := waiting.get()) is not None:
        under_way, told = each
        error: Exception | None = None
        try:
            under_way.work.wait()
        except Exception as failed:
            error = failed
        told.put((under_way, error))
        del each, under_way, told, error  # the next wait keeps no memory of this one


def _end(lanes: dict[tuple[int, int], _Waiting]) -> None:
    for waiting in lanes.values():
        waiting.put(None)
