"""Broadcasts the losses of a step from the last stage to every rank.

They are known when the last stage has done its last forward, long before the step ends. Sent then, they reach the other ranks
while those still work, however slow the link.

Some ranks receive them at the end instead, because the losses would queue with other messages:

- A rank that shares parameters with the last stage, where each rank has one stage. Its gradients take the same channel, and a
  channel's messages are received in the order of their sends.
- A rank to which the last stage's rank sends activations, those of another of its stages, which take that channel.
- All ranks, if two ranks have one queue for everything. There a receive of the losses would block the ops that lead to them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.program.placement import has_several
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport


class LossBroadcast:
    """One rank's end. Used by the thread that runs the steps.

    Args:
        rank: This rank; messages name it by its first stage.
        placement: ``placement[stage]`` is the stage's rank.
        microbatches: The most microbatches of a step. One of fewer has zeros behind them.
        loss: The loss of one microbatch: a scalar, or a sum and its weight.
        sharing: The ranks that share parameters with the last stage.
        transport: Carries the messages.
        shape: The code of the batch's shape, which both sides compare.
    """

    def __init__(
        self,
        rank: int,
        placement: Sequence[int],
        microbatches: int,
        loss: TensorSpec,
        sharing: Collection[int],
        transport: Transport,
        shape: int = 0,
    ) -> None:
        self._rank = rank
        self._placement = placement
        self._last, self._source = len(placement) - 1, placement[-1]
        self._spec: MessageSpec = (TensorSpec((microbatches, *loss.shape), loss.dtype),)
        others = sorted(set(placement) - {self._source})
        busy = {there for here, there in pairwise(placement) if here == self._source}
        in_line = others if transport.contract.in_order else busy.union(() if has_several(placement) else sharing)
        self._at_once = [other for other in others if other not in in_line]
        self._at_the_end = [other for other in others if other in in_line]
        self._transport = transport
        self._shape = shape
        self._step = 0
        self._losses: Tensor | None = None
        self._pending: Pending | None = None

    def receive_counts(self) -> dict[tuple[int, MessageSpec], int]:
        """Return the number of receive buffers needed at a time, per source rank and message."""
        return {} if self._rank == self._source else {(self._source, self._spec): 1}

    def begin_step(self, step: int) -> None:
        """Post the receive of a step's losses, after the probes and before shared gradients."""
        self._step = step
        if self._rank in self._at_once:
            self._pending = self._receive()

    def send(self, results: Mapping[int, tuple[Tensor, ...]]) -> None:
        """Broadcast the losses that the last stage has computed, one per microbatch."""
        losses = torch.stack([results[microbatch][0].detach() for microbatch in range(len(results))])
        count, *shape = self._spec[0].shape
        losses = losses.reshape(len(results), *shape)
        self._losses = torch.cat([losses, losses.new_zeros(count - len(results), *shape)]) if len(results) < count else losses
        self._send_to(self._at_once)

    def end_step(self, timeout: float) -> Tensor:
        """Return the loss of every microbatch, (microbatches,) or (microbatches, 2), with zeros behind them, on every rank.

        Args:
            timeout: Seconds to wait for them.

        Raises:
            TransportError: They could not be exchanged.
        """
        if self._losses is not None:
            self._send_to(self._at_the_end)
            losses, self._losses = self._losses, None
            return losses
        pending, self._pending = self._pending or self._receive(), None
        losses = pending.wait(timeout)[0].clone()
        self._transport.release(pending)
        return losses

    def _send_to(self, ranks: Collection[int]) -> None:
        assert self._losses is not None, "the last stage has computed them"
        for other in ranks:
            self._transport.send(other, self._identity(other), (self._losses,))

    def _receive(self) -> Pending:
        return self._transport.receive(self._source, self._identity(self._rank))

    def _identity(self, destination: int) -> Identity:
        there = self._placement.index(destination)
        return Identity(self._step, Purpose.LOSS, self._last, there, 0, self._spec, shape=self._shape)
