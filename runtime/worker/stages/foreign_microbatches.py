"""What crosses replicas after the ops of a step, because a worker of another replica computes a microbatch.

Its home receives the results. If the last microbatch of a stage is computed elsewhere, the sums of weight gradients then come
home too.

Both sides go through the same list in the same order, so the messages of a channel are received in the order of their sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec
from adaptra.program import Op, Program
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
    """One rank's results and sums that cross replicas. Used by the thread that runs the steps.

    In a program of one pipeline, and without such microbatches, there are no messages.

    Args:
        program: A lowered program.
        rank: This rank.
        results: What the last stage returns for a microbatch.
        weights: Per stage the tensors in which its weight gradients are handed over.
        transport: Carries the messages.
        timeout: Seconds to wait for a message before the step fails.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        results: MessageSpec,
        weights: Sequence[MessageSpec],
        transport: Transport,
        timeout: float,
    ) -> None:
        self._results_from, self._results_to = _of(rank, _returned(program, results, weights))
        self._transport = transport
        self._timeout = timeout
        self._step = -1
        self._computed: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}

    @property
    def receive_counts(self) -> Counter[tuple[int, MessageSpec]]:
        """The number of receive buffers needed at a time, per source rank and message."""
        return Counter((one.source, one.specs) for one in self._results_to)

    def begin_step(self, step: int) -> None:
        """Name the messages from now on by this step."""
        self._step = step
        self._computed.clear()

    def keep(self, op: Op, results: tuple[Tensor, ...]) -> None:
        """Keep the results of another replica's microbatch until the end of the step."""
        self._computed[op.replica, op.stage, op.microbatch] = results

    def end_step(self, stages: Mapping[tuple[int, int], Stage], found: Callable[[int, tuple[Tensor, ...]], None]) -> None:
        """Send results and sums of other replicas, and take those of the own one that others have computed.

        Args:
            stages: The stages of this rank by replica and index; their sums are handed over.
            found: Called with each number of a microbatch and its results.

        Raises:
            TransportError: A message could not be exchanged, or not within the timeout.
        """
        receives = [(one, self._receive(one)) for one in self._results_to]
        for one in self._results_from:
            is_result = one.purpose is Purpose.RESULT
            tensors = self._computed.pop(one.place) if is_result else stages[one.replica, one.stage].hand_over()
            self._transport.send(one.destination, self._identity(one), tensors)
        for one, pending in receives:
            tensors = pending.wait(self._timeout)
            if one.purpose is Purpose.RESULT:
                found(one.microbatch, tuple(each.clone() for each in tensors))
            else:
                stages[one.replica, one.stage].take_over(tensors)
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


def _returned(program: Program, results: MessageSpec, weights: Sequence[MessageSpec]) -> Iterator[_CrossingMessage]:
    """Yield the messages behind the last op: results, and the sums of stages whose last microbatch was computed elsewhere."""
    last, final = program.stages - 1, program.microbatches - 1
    for replica, microbatch, home, holder in program.routing.away(last):
        yield _CrossingMessage(Purpose.RESULT, replica, last, microbatch, holder, home, results)
    for stage in range(program.stages):
        for replica, microbatch, home, holder in program.routing.away(stage):
            if microbatch == final:
                yield _CrossingMessage(Purpose.ACCUMULATOR, replica, stage, microbatch, holder, home, weights[stage])
