"""What crosses replicas after the ops of a step, because a worker of another replica computes a microbatch.

If the last microbatch of a stage is computed elsewhere, the sums of weight gradients come home.

Both sides go through the same list in the same order, so the messages of a channel are received in the order of their sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from adaptra.graph.ops.specs import MessageSpec
from adaptra.program import Program
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport
from adaptra.runtime.worker.stages.stage import Stage


class _CrossingMessage(NamedTuple):
    """One message between the home of a microbatch and the worker that computes it on the first or the last stage."""

    purpose: Purpose
    replica: int
    stage: int
    microbatch: int
    source: int
    destination: int
    specs: MessageSpec

    @property
    def place(self) -> tuple[int, int, int]:
        """The replica, stage and number of the microbatch."""
        return self.replica, self.stage, self.microbatch


class ForeignMicrobatches:
    """One rank's sums that cross replicas. Used by the thread that runs the steps.

    In a program of one pipeline, and without such microbatches, there are no messages.

    Args:
        program: A lowered program.
        rank: This rank.
        weights: Per stage the tensors in which its weight gradients are handed over.
        transport: Carries the messages.
        timeout: Seconds to wait for a message before the step fails.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        weights: Sequence[MessageSpec],
        transport: Transport,
        timeout: float,
    ) -> None:
        self._results_from, self._results_to = _of(rank, _returned(program, weights))
        self._transport = transport
        self._timeout = timeout
        self._step = -1

    @property
    def receive_counts(self) -> Counter[tuple[int, MessageSpec]]:
        """The number of receive buffers needed at a time, per source rank and message."""
        return Counter((one.source, one.specs) for one in self._results_to)

    def begin_step(self, step: int) -> None:
        """Name the messages from now on by this step."""
        self._step = step

    def end_step(self, stages: Mapping[tuple[int, int], Stage]) -> None:
        """Send sums of other replicas, and take those of the own one that others have computed.

        Args:
            stages: The stages of this rank by replica and index; their sums are handed over.

        Raises:
            TransportError: A message could not be exchanged, or not within the timeout.
        """
        receives = [(one, self._receive(one)) for one in self._results_to]
        for one in self._results_from:
            tensors = stages[one.replica, one.stage].hand_over()
            self._transport.send(one.destination, self._identity(one), tensors)
        for one, pending in receives:
            stages[one.replica, one.stage].take_over(pending.wait(self._timeout))
            self._transport.release(pending)

    def _receive(self, message: _CrossingMessage) -> Pending:
        return self._transport.receive(message.source, self._identity(message))

    def _identity(self, message: _CrossingMessage) -> Identity:
        stage, specs = message.stage, message.specs
        return Identity(self._step, message.purpose, stage, stage, message.microbatch, specs, message.replica)


def _of(rank: int, messages: Iterable[_CrossingMessage]) -> tuple[list[_CrossingMessage], list[_CrossingMessage]]:
    """Return the messages that a rank sends, and those that it receives."""
    found = list(messages)
    return [one for one in found if one.source == rank], [one for one in found if one.destination == rank]


def _returned(program: Program, weights: Sequence[MessageSpec]) -> Iterator[_CrossingMessage]:
    """Yield the sums of stages whose last microbatch was computed elsewhere."""
    final = program.microbatches - 1
    for stage in range(program.stages):
        for replica, microbatch, home, holder in program.routing.away(stage):
            if microbatch == final:
                yield _CrossingMessage(Purpose.ACCUMULATOR, replica, stage, microbatch, holder, home, weights[stage])
