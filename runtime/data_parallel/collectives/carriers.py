"""What brings the messages of sums to other replicas: a process group of torch.distributed, of gloo or NCCL."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from adaptra.collectives.rounds import TermMessage
from adaptra.runtime.data_parallel.collectives.openings import Opening
from adaptra.runtime.devices.read_later import ReadLater

OPENING_TAG: Final = 2**30
"""The tag of what replicas say ahead of a sum. Those of sums are below, and those that nobody sends or receives far above."""


@dataclass(frozen=True, slots=True, eq=False)
class _TermUnderWay:
    """A message under way.

    Attributes:
        message: What it is, or what is said ahead of a sum.
        tensor: The value.
        memory: What the group sends or fills: of a value on a GPU a copy in pinned memory, unless the group carries GPUs' own.
        work: The operation; None if another one's stands for it.
    """

    message: TermMessage | Opening
    tensor: Tensor
    memory: Tensor
    work: dist.Work | None


class GroupCarrier:
    """The messages of one sum over NCCL, whose operations end in their order: a wait for one is queued on the stream.

    Args:
        group: The replicas.

    Attributes:
        works: Those whose ends were waited for.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: Any = group  # torch's annotations lack some of its methods
        self._rank = group.rank()
        self._under_way: list[_TermUnderWay] = []
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
        self._under_way += [
            _TermUnderWay(message, tensor, tensor, work) for (message, tensor), work in zip(receives_first, works, strict=True)
        ]

    def next(self) -> tuple[TermMessage, Tensor]:
        """See :meth:`.moves.Carrier.next`."""
        return self._arrived(self._earliest())

    def finish(self) -> None:
        """Do nothing: once no message is under way, nothing is."""

    def _earliest(self) -> _TermUnderWay:
        earliest = min(self._under_way, key=lambda one: one.message.round)
        self._under_way.remove(earliest)
        if earliest.work is not None:
            earliest.work.wait()
            self.works.append(earliest.work)
        return earliest

    def _operation(self, message: TermMessage | Opening, memory: Tensor, tag: int = 0) -> dist.Work:
        if message.source == self._rank:
            return self._group.send([memory], message.destination, tag)
        return self._group.recv([memory], message.source, tag)

    def _arrived(self, ended: _TermUnderWay) -> tuple[TermMessage, Tensor]:
        assert isinstance(ended.message, TermMessage), "openings are no values"
        if ended.memory is not ended.tensor and ended.message.destination == self._rank:
            ended.tensor.copy_(ended.memory, non_blocking=True)
        return ended.message, ended.tensor


class GlooCarrier(GroupCarrier):
    """The messages of one sum over gloo, which end in any order. Those of GPUs cross by way of pinned memory.

    Args:
        group: The replicas.
        tag_of: The tag of messages with a replica; those of other tags never meet. gloo ends a process where sizes differ.
        waits: What waits for them; None if the calling thread does, for the earliest.
    """

    def __init__(self, group: dist.ProcessGroup, tag_of: Callable[[int], int], waits: Waits | None) -> None:
        super().__init__(group)
        self._tag_of = tag_of
        self._waits = waits
        self._openings = 0
        self._value: _TermUnderWay | None = None
        self._ended: SimpleQueue[tuple[_TermUnderWay, Exception | None]] = SimpleQueue()

    @property
    def has_ended(self) -> bool:
        """See :attr:`.moves.Carrier.has_ended`."""
        while self._value is None and not self._ended.empty():
            self._take()
        return self._value is not None

    def begin(self, messages: Sequence[tuple[TermMessage, Tensor]]) -> None:
        """See :meth:`.moves.Carrier.begin`. The calling thread waits until the value of a GPU is on the host."""
        for message, tensor in messages:
            if message.source == self._rank:
                memory = ReadLater(tensor).wait()
            else:
                memory = torch.empty_like(tensor, device="cpu", pin_memory=True) if tensor.is_cuda else tensor
            peer = message.destination if message.source == self._rank else message.source
            self._add(_TermUnderWay(message, tensor, memory, self._operation(message, memory, self._tag_of(peer))))

    def open(self, openings: Sequence[Opening]) -> None:
        """Begin to say what this replica will do, and to hear what others will. They are compared before any later message."""
        for opening in openings:
            memory = opening.memory() if opening.source == self._rank else opening.place()
            self._add(_TermUnderWay(opening, memory, memory, self._operation(opening, memory, OPENING_TAG)))
            self._openings += 1

    def next(self) -> tuple[TermMessage, Tensor]:
        """See :meth:`.moves.Carrier.next`.

        Raises:
            ControlError: Another replica does something else.
        """
        while self._value is None:
            self._take()
        ended, self._value = self._value, None
        return self._arrived(ended)

    def finish(self) -> None:
        """Wait for what is left to hear, once no message is under way; raises as :meth:`next`."""
        while self._openings:
            self._take()

    def _take(self) -> None:
        """Wait for what ends next: a value is kept for :meth:`next`, and what another replica says is compared."""
        ended = self._next()
        if not isinstance(ended.message, Opening):
            self._value = ended
            return
        self._openings -= 1
        if ended.message.destination == self._rank:
            ended.message.check(ended.memory)

    def _add(self, under_way: _TermUnderWay) -> None:
        if self._waits is None:
            self._under_way.append(under_way)
        else:
            self._waits.add(under_way, self._ended)

    def _next(self) -> _TermUnderWay:
        if self._waits is None:
            return self._earliest()
        ended, error = self._ended.get()
        if error is not None:
            raise error
        return ended


_Told = SimpleQueue[tuple[_TermUnderWay, Exception | None]]
_Waiting = SimpleQueue[tuple[_TermUnderWay, _Told] | None]


class Waits:
    """Waits for operations of gloo, which tells their ends only to threads that wait. So each peer and direction has one.

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
            assert under_way.work is not None, "gloo gives a work for each operation"
            under_way.work.wait()
        except Exception as failed:
            error = failed
        told.put((under_way, error))
        del each, under_way, told, error  # the next wait keeps no memory of this one


def _end(lanes: dict[tuple[int, int], _Waiting]) -> None:
    for waiting in lanes.values():
        waiting.put(None)
