"""What crosses replicas before and after the ops of a step, because a worker of another replica computes a microbatch.

The home replica has the batch. Before the first op its workers send the inputs and targets of microbatches whose first or last
stage others compute. They also say whether the user asks for the model's outputs. After the last op they receive the results.
If the last microbatch of a stage is computed elsewhere, the sums of weight gradients then come home too.

Both sides go through the same list in the same order, so the messages of a channel are received in the order of their sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.program import Op, Program
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport
from adaptra.runtime.worker.stages.stage import Stage

_ASKED: Final[MessageSpec] = (TensorSpec((1,), torch.uint8),)
"""The message that says whether a replica asks for outputs."""


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """The tensors of one microbatch.

    Attributes:
        inputs: The model's inputs, as the first stage takes them.
        targets: The loss's targets, as the last stage takes them.
        results: What the last stage returns.
    """

    inputs: MessageSpec = ()
    targets: MessageSpec = ()
    results: MessageSpec = ()


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
    """One rank's inputs, targets, results and sums that cross replicas. Used by the thread that runs the steps.

    In a program of one pipeline, and without such microbatches, there are no messages.

    Args:
        program: A lowered program.
        rank: This rank.
        shapes: The tensors of a microbatch.
        weights: Per stage the tensors in which its weight gradients are handed over.
        transport: Carries the messages.
        timeout: Seconds to wait for a message before the step fails.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        shapes: BatchShapes,
        weights: Sequence[MessageSpec],
        transport: Transport,
        timeout: float,
    ) -> None:
        self._given_from, self._given_to = _of(rank, _given(program, shapes))
        self._results_from, self._results_to = _of(rank, _returned(program, shapes.results, weights))
        self._transport = transport
        self._timeout = timeout
        self._step = -1
        self._arriving: dict[tuple[Purpose, tuple[int, int, int]], Pending] = {}
        self._asking: dict[int, Pending] = {}
        self._computed: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}

    @property
    def receive_counts(self) -> Counter[tuple[int, MessageSpec]]:
        """The number of receive buffers needed at a time, per source rank and message."""
        return Counter((one.source, one.specs) for one in (*self._given_to, *self._results_to))

    def begin_step(
        self, step: int, inputs: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]], *, asks: bool
    ) -> None:
        """Post the receives of inputs and targets for other replicas' microbatches, and send those of the own ones.

        Args:
            step: The step's number.
            inputs: The model's inputs per microbatch of this rank's replica; only used on its first stage's rank.
            targets: The targets; only used on its last stage's rank.
            asks: Whether this rank asks for the model's outputs; only used on its last stage's rank.
        """
        self._step = step
        self._computed.clear()
        arriving = [(one, self._receive(one)) for one in self._given_to]
        self._asking = {one.replica: pending for one, pending in arriving if one.purpose is Purpose.OUTPUTS_ASKED}
        self._arriving = {
            (one.purpose, one.place): pending for one, pending in arriving if one.purpose is not Purpose.OUTPUTS_ASKED
        }
        for one in self._given_from:
            if one.purpose is Purpose.OUTPUTS_ASKED:
                given: Sequence[Tensor] = (torch.tensor([asks], dtype=torch.uint8),)
            else:
                given = (inputs if one.purpose is Purpose.INPUT else targets)[one.microbatch]
            self._transport.send(one.destination, self._identity(one), tuple(given))

    def first_asked(self, op: Op) -> bool:
        """Wait for the wish of another replica at its first F here on the last stage, and return whether it asks for outputs.

        Raises:
            TransportError: It could not be exchanged, or not within the timeout.
        """
        pending = self._asking.pop(op.replica, None)
        if pending is None:
            return False
        asks = bool(pending.wait(self._timeout)[0].item())
        self._transport.release(pending)
        return asks

    def take(self, purpose: Purpose, op: Op) -> tuple[Tensor, ...]:
        """Wait for the inputs or targets of an F and return them; they stay valid until :meth:`release_after`.

        Raises:
            TransportError: They could not be exchanged, or not within the timeout.
        """
        return self._arriving[purpose, (op.replica, op.stage, op.microbatch)].wait(self._timeout)

    def keep(self, op: Op, results: tuple[Tensor, ...]) -> None:
        """Keep the results of another replica's microbatch until the end of the step."""
        self._computed[op.replica, op.stage, op.microbatch] = results

    def release_after(self, op: Op) -> None:
        """Release the inputs and targets of a microbatch, of which ``op`` was the last one on its stage."""
        if self._arriving:
            for purpose in (Purpose.INPUT, Purpose.TARGET):
                pending = self._arriving.pop((purpose, (op.replica, op.stage, op.microbatch)), None)
                if pending is not None:
                    self._transport.release(pending)

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


def _given(program: Program, shapes: BatchShapes) -> Iterator[_CrossingMessage]:
    """Yield the messages before the first op: wishes, inputs and targets, from home to the worker that computes them."""
    last = program.stages - 1
    for replica, home, holder in dict.fromkeys((one.replica, one.home, one.holder) for one in program.routing.away(last)):
        yield _CrossingMessage(Purpose.OUTPUTS_ASKED, replica, last, 0, home, holder, _ASKED)
    for purpose, stage, specs in ((Purpose.INPUT, 0, shapes.inputs), (Purpose.TARGET, last, shapes.targets)):
        for replica, microbatch, home, holder in program.routing.away(stage):
            if specs:
                yield _CrossingMessage(purpose, replica, stage, microbatch, home, holder, specs)


def _returned(program: Program, results: MessageSpec, weights: Sequence[MessageSpec]) -> Iterator[_CrossingMessage]:
    """Yield the messages behind the last op: results, and the sums of stages whose last microbatch was computed elsewhere."""
    last, final = program.stages - 1, program.microbatches - 1
    for replica, microbatch, home, holder in program.routing.away(last):
        yield _CrossingMessage(Purpose.RESULT, replica, last, microbatch, holder, home, results)
    for stage in range(program.stages):
        for replica, microbatch, home, holder in program.routing.away(stage):
            if microbatch == final:
                yield _CrossingMessage(Purpose.ACCUMULATOR, replica, stage, microbatch, holder, home, weights[stage])
