"""What the slots of a pipeline's program hold in a step, see :mod:`adaptra.program.open_tail`.

The rank of the first stage claims microbatches. It tells the other ranks of its pipeline what each slot holds, before these
have anything to do for it. At the end it tells who has taken microbatches of this replica.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

import torch

from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.runtime.synchrony.admissions import Admissions
from adaptra.runtime.synchrony.claims import Claims
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport

_END: Final = -1


class SlotMicrobatch(NamedTuple):
    """A microbatch that a slot holds. One of the step before has a negative number: -1 is that step's last."""

    replica: int
    microbatch: int


class Slots(ABC):
    """The slots of this rank's pipeline.

    Args:
        replica: This replica.
        microbatches: The number of microbatches of each replica.

    Attributes:
        held: What the slots hold that are known.
        takers: By whom each of this replica's microbatches is computed that another has taken, once it is known.
        has_ended: Whether all further slots are empty.
        asks: Whether the rank of the first stage asks for the step's outputs; elsewhere once all slots are known.
    """

    def __init__(self, replica: int, microbatches: int) -> None:
        self._replica = replica
        self._microbatches = microbatches
        self._step = -1
        self.held: list[SlotMicrobatch] = []
        self.takers: Mapping[int, int] = {}
        self.has_ended = False
        self.asks = False

    def begin_step(self, step: int, first: range, *, is_open: bool) -> None:
        """Begin a step.

        Args:
            step: The step's number.
            first: This replica's microbatches in the first slots, which all of its ranks know beforehand.
            is_open: Whether it is decided as the step runs what further slots hold. If not, this replica computes all of its
                microbatches, and no others.
        """
        self._step = step
        self.held = [SlotMicrobatch(self._replica, microbatch) for microbatch in first]
        self.takers, self.has_ended = {}, False
        self._begin(is_open=is_open)

    def is_known(self, slot: int) -> bool:
        """Return whether it is known here what a slot holds. Does not wait."""
        return slot < len(self.held) or self.has_ended

    def of(self, slot: int) -> SlotMicrobatch | None:
        """Return what a known slot holds; None if it is empty."""
        return self.held[slot] if slot < len(self.held) else None

    @abstractmethod
    def fill(self, slot: int) -> SlotMicrobatch | None:
        """Return what a slot holds, once it is known. All slots before it are known."""
        ...

    def ask(self, slot: int) -> None:  # noqa: B027 - one of both has someone to ask
        """Begin to find out what a slot holds, which is filled as the next one. Does not wait."""

    @abstractmethod
    def end_step(self) -> None:
        """Wait until everything is known."""
        ...

    def receive_counts(self) -> dict[tuple[int, MessageSpec], int]:
        """Return the number of receive buffers needed at a time, per source rank of the pipeline and message."""
        return {}

    @abstractmethod
    def _begin(self, *, is_open: bool) -> None: ...

    def close(self) -> None:  # noqa: B027 - one of both has something to close
        """End what serves this rank alone."""

    @property
    def own(self) -> int:
        """How many of the step's microbatches this replica computes itself, of those that are known."""
        return sum(one.replica == self._replica and one.microbatch >= 0 for one in self.held)

    def _spec(self) -> MessageSpec:
        return (TensorSpec((self._microbatches + 3,), torch.int64, stays_on_host=True),)

    def _identity(self, stage: int) -> Identity:
        return Identity(self._step, Purpose.SLOT, 0, stage, len(self.held), self._spec())


class DecidedSlots(Slots):
    """Those of the rank of the first stage, which decides. A thread asks the store, beside the ops of this rank.

    Args:
        replica, microbatches: As of :class:`Slots`.
        placement: ``placement[stage]`` is the stage's rank.
        transport: Joins the ranks of the pipeline.
    """

    def __init__(self, replica: int, microbatches: int, placement: Sequence[int], transport: Transport) -> None:
        super().__init__(replica, microbatches)
        self._placement = placement
        self._transport = transport
        self._thread = ThreadPoolExecutor(1, "adaptra-slots")
        self._opened: Future[None] = Future()
        self._asked: Future[SlotMicrobatch | None] | None = None

    def _begin(self, *, is_open: bool) -> None:
        self._asked = None
        own = self.own
        self._opened = self._thread.submit(self._open, own if is_open else self._microbatches)
        if not is_open:
            self._end(self._microbatches)
            self.held += [SlotMicrobatch(self._replica, one) for one in range(own, self._microbatches)]

    def ask(self, slot: int) -> None:
        """Begin to decide what a slot holds, beside an op of this rank, which so hides the store's answer."""
        if not self.is_known(slot) and self._asked is None:
            self._asked = self._thread.submit(self._next)

    def fill(self, slot: int) -> SlotMicrobatch | None:
        """Decide what a slot holds."""
        if not self.is_known(slot):
            self.ask(slot)
            assert self._asked is not None, "a slot that isn't known is asked for"
            held, self._asked = self._asked.result(), None
            if held is None:
                self.end_step()
            else:
                self._tell(held)
                self.held.append(held)
        return self.of(slot)

    def end_step(self) -> None:
        """Tell the other ranks that further slots are empty."""
        self._opened.result()
        if not self.has_ended:
            self._end(self._settled())

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    @abstractmethod
    def _open(self, own: int) -> None:
        """Begin a step in the store, where this many of the replica's microbatches are its own in any case."""
        ...

    @abstractmethod
    def _next(self) -> SlotMicrobatch | None:
        """Decide what the next slot holds; None if it is empty, and all further ones."""
        ...

    @abstractmethod
    def _settled(self) -> int:
        """Return how many microbatches this replica computes itself, once nothing is left to decide."""
        ...

    def _end(self, own: int) -> None:
        takers = [self.takers.get(microbatch, _END) for microbatch in range(self._microbatches)]
        self._tell((_END, own, self.asks, *takers))
        self.has_ended = True

    def _tell(self, numbers: Sequence[int]) -> None:
        told = torch.tensor([*numbers, *[0] * (self._microbatches + 3 - len(numbers))], dtype=torch.int64)
        for stage, rank in enumerate(self._placement[1:], 1):
            self._transport.send(rank, self._identity(stage), (told,))


class ClaimedSlots(DecidedSlots):
    """Those that hold this replica's microbatches while anything is left there, and then others'.

    Args:
        replica, microbatches, placement, transport: As of :class:`DecidedSlots`.
        most: The most microbatches of others that this replica takes in a step.
        claims: This replica's claims.
        may: Returns whether microbatches of another replica can be computed now.
    """

    def __init__(
        self,
        replica: int,
        microbatches: int,
        placement: Sequence[int],
        transport: Transport,
        most: int,
        claims: Claims,
        may: Callable[[int], bool],
    ) -> None:
        super().__init__(replica, microbatches, placement, transport)
        self._most = most
        self._claims = claims
        self._may = may

    def close(self) -> None:
        """End the thread, and the connection to the store."""
        super().close()
        self._claims.close()

    def _open(self, own: int) -> None:
        self._claims.open(self._step, own)

    def _next(self) -> SlotMicrobatch | None:
        own = self._claims.claim()
        if own is not None:
            return SlotMicrobatch(self._replica, own)
        if sum(one.replica != self._replica for one in self.held) >= self._most:
            return None
        stolen = self._claims.steal(self._may)
        return None if stolen is None else SlotMicrobatch(*stolen)

    def _settled(self) -> int:
        self.takers = self._claims.takers
        return self._microbatches - len(self.takers)


class AdmittedSlots(DecidedSlots):
    """Those that hold this replica's own microbatches, up to a deadline.

    Args:
        replica, microbatches, placement, transport: As of :class:`DecidedSlots`.
        admissions: Says whether another microbatch may begin.
    """

    def __init__(
        self, replica: int, microbatches: int, placement: Sequence[int], transport: Transport, admissions: Admissions
    ) -> None:
        super().__init__(replica, microbatches, placement, transport)
        self._admissions = admissions

    def close(self) -> None:
        """End the thread, and the connection to the store."""
        super().close()
        self._admissions.close()

    def _open(self, own: int) -> None:
        self._admissions.begin_step(self._step)

    def _next(self) -> SlotMicrobatch | None:
        is_left = self.own < self._microbatches
        return SlotMicrobatch(self._replica, self.own) if is_left and self._admissions.ask(self.own) else None

    def _settled(self) -> int:
        return self.own


class ToldSlots(Slots):
    """Those of any other rank, which is told.

    Args:
        replica, microbatches: As of :class:`Slots`.
        stage: This rank's stage.
        source: The rank of the first stage.
        transport: Joins the ranks of the pipeline.
        timeout: Seconds to wait for the first stage's rank.
    """

    def __init__(self, replica: int, microbatches: int, stage: int, source: int, transport: Transport, timeout: float) -> None:
        super().__init__(replica, microbatches)
        self._stage = stage
        self._source = source
        self._transport = transport
        self._timeout = timeout
        self._arriving: Pending | None = None

    def receive_counts(self) -> dict[tuple[int, MessageSpec], int]:
        """Return the number of receive buffers needed at a time, per source rank of the pipeline and message."""
        return {(self._source, self._spec()): 1}

    def _begin(self, *, is_open: bool) -> None:
        self._arriving = self._transport.receive(self._source, self._identity(self._stage))

    def is_known(self, slot: int) -> bool:
        """Return whether it is known here what a slot holds, with what has arrived by now."""
        while not super().is_known(slot) and self._arriving is not None and self._arriving.done:
            self._take(self._arriving)
        return super().is_known(slot)

    def fill(self, slot: int) -> SlotMicrobatch | None:
        """Return what a slot holds, once it is told."""
        while not super().is_known(slot) and self._arriving is not None:
            self._take(self._arriving)
        return self.of(slot)

    def end_step(self) -> None:
        """Wait until everything is told."""
        while self._arriving is not None:
            self._take(self._arriving)

    def _take(self, pending: Pending) -> None:
        replica, microbatch, asks, *takers = pending.wait(self._timeout)[0].tolist()
        self._transport.release(pending)
        self._arriving = None
        if replica == _END:
            self.held += [SlotMicrobatch(self._replica, one) for one in range(self.own, microbatch)]
            self.takers = {one: taker for one, taker in enumerate(takers) if taker != _END}
            self.has_ended, self.asks = True, bool(asks)
        else:
            self.held.append(SlotMicrobatch(replica, microbatch))
            self._arriving = self._transport.receive(self._source, self._identity(self._stage))
