"""Broadcasts each microbatch's outputs or input gradients from one rank to all.

Each microbatch is sent as soon as it is computed, so most have arrived when the last one is computed, however slow the link.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport


class Broadcast:
    """One rank's end, in a pipeline with one stage per rank. Used by the thread that runs the steps.

    Args:
        source: The rank that computes, and its stage.
        purpose: The purpose of the messages: outputs, or gradients of inputs.
        microbatches: Microbatches per step.
        specs: The tensors of each microbatch; nothing is sent if this is empty.
        transport: Carries the messages.
    """

    def __init__(self, source: int, purpose: Purpose, microbatches: int, specs: MessageSpec, transport: Transport) -> None:
        self._source = source
        self._purpose = purpose
        self._microbatches = microbatches
        self._specs = specs
        self._transport = transport
        self._others = [rank for rank in range(transport.world_size) if rank != source] if specs else []
        self._step = 0
        self._pending: list[Pending] = []
        self._own: list[tuple[Tensor, ...]] = []

    def receive_counts(self) -> dict[tuple[int, MessageSpec], int]:
        """Return the number of receive buffers needed at a time, per source rank and message."""
        return {(self._source, self._specs): self._microbatches} if self._transport.rank in self._others else {}

    def begin_step(self, step: int) -> None:
        """Post the receives of a step."""
        self._step = step
        if not self._transport.contract.in_order:  # else they would delay messages from this rank to the source
            self._pending = self._receive()

    def send(self, microbatch: int, results: tuple[Tensor, ...]) -> None:
        """Broadcast the results of a microbatch, which the source has just computed. Microbatches come in ascending order."""
        self._own.append(results)
        for other in self._others:
            self._transport.send(other, self._identity(other, microbatch), results)

    def end_step(self, timeout: float) -> tuple[Tensor, ...]:
        """Return each tensor for the whole batch, the same on every rank: the microbatches concatenated.

        Args:
            timeout: Seconds to wait for each microbatch.

        Raises:
            TransportError: They could not be exchanged.
        """
        pending, self._pending = self._pending or self._receive(), []
        own, self._own = self._own, []
        whole = tuple(map(_joined, zip(*([one.wait(timeout) for one in pending] or own), strict=True)))
        for one in pending:
            self._transport.release(one)
        return whole

    def _receive(self) -> list[Pending]:
        rank = self._transport.rank
        count = self._microbatches if rank in self._others else 0
        return [self._transport.receive(self._source, self._identity(rank, microbatch)) for microbatch in range(count)]

    def _identity(self, destination: int, microbatch: int) -> Identity:
        return Identity(self._step, self._purpose, self._source, destination, microbatch, self._specs)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the concatenation as a tensor of its own. That of a single microbatch may be without dimensions."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0].clone()
