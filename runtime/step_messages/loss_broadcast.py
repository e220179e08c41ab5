"""The losses of a step: computed by the last stage, told to every rank.

They are known when the last stage has done its last forward, long before the step ends: told then, they reach the other ranks
while those still work, however slow the way is. A rank that shares parameters with the last stage gets them at the end: their
gradients take the same channel, and messages on a channel are received in the order in which they are sent. So do all where the
first stage lies on the last one's rank, whose activations take that channel, and where two ranks have one queue for everything:
a receive that waits there for the last forward would hold up what leads to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport


class LossBroadcast:
    """One rank's end. Used by the thread that runs the steps.

    Args:
        rank: This rank; messages name it by its first stage, which has the same number.
        placement: ``placement[stage]`` is the stage's rank.
        microbatches: Microbatches per step.
        loss: Of one microbatch: a scalar, or a sum and its weight.
        sharing: The ranks that share parameters with the last stage.
        transport: Carries them.
    """

    def __init__(
        self,
        rank: int,
        placement: Sequence[int],
        microbatches: int,
        loss: TensorSpec,
        sharing: Collection[int],
        transport: Transport,
    ) -> None:
        self._rank = rank
        self._last, self._source = len(placement) - 1, placement[-1]
        self._spec: MessageSpec = (TensorSpec((microbatches, *loss.shape), loss.dtype),)
        others = sorted(set(placement) - {self._source})
        in_line = others if transport.contract.in_order or self._source == placement[0] else sharing
        self._at_once = [other for other in others if other not in in_line]
        self._at_the_end = [other for other in others if other in in_line]
        self._transport = transport
        self._step = 0
        self._told: Tensor | None = None
        self._pending: Pending | None = None

    def receive_counts(self) -> dict[tuple[int, MessageSpec], int]:
        """How many receive buffers this takes at a time, per source rank and message."""
        return {} if self._rank == self._source else {(self._source, self._spec): 1}

    def begin_step(self, step: int) -> None:
        """Expect a step's losses, after the probes and before what is shared."""
        self._step = step
        if self._rank in self._at_once:
            self._pending = self._receive()

    def tell(self, results: Mapping[int, tuple[Tensor, ...]]) -> None:
        """The last stage has computed them, one per microbatch."""
        told = torch.stack([results[microbatch][0].detach() for microbatch in range(len(results))])
        self._told = told.reshape(self._spec[0].shape)
        self._send(self._at_once)

    def end_step(self, timeout: float) -> Tensor:
        """The loss of every microbatch, (microbatches,) or (microbatches, 2), the same on every rank.

        Args:
            timeout: Seconds to wait for them.

        Raises:
            TransportError: They could not be exchanged.
        """
        if self._told is not None:
            self._send(self._at_the_end)
            told, self._told = self._told, None
            return told
        pending, self._pending = self._pending or self._receive(), None
        losses = pending.wait(timeout)[0].clone()
        self._transport.release(pending)
        return losses

    def _send(self, ranks: Collection[int]) -> None:
        assert self._told is not None, "the last stage has told them"
        for other in ranks:
            self._transport.send(other, self._identity(other), (self._told,))

    def _receive(self) -> Pending:
        return self._transport.receive(self._source, self._identity(self._rank))

    def _identity(self, destination: int) -> Identity:
        return Identity(self._step, Purpose.LOSS, self._last, destination, 0, self._spec)
