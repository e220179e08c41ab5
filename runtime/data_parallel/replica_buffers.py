"""Buffers that a model changes, kept equal over data-parallel replicas as DDP does: all take the first replica's values.

Before each forward pass the first replica's buffers are broadcast, all of a stage in one message per device. The message
travels while the step begins, and a stage waits for it before its first F. Except on the first stage that costs nothing,
because those stages wait equally long for their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaptra.runtime.data_parallel.gradient_averaging import PendingBroadcast, Replicas


class ReplicaBuffers:
    """The buffers of one rank's stages.

    Args:
        replicas: The ranks that have copies of them.
        buffers: The same ones, in the same order, on each of these ranks. Each replica keeps its own of others.
    """

    def __init__(self, replicas: Replicas, buffers: Sequence[Tensor]) -> None:
        self._replicas = replicas
        self._buffers = tuple(buffers)
        self._arriving: list[tuple[tuple[Tensor, ...], PendingBroadcast]] = []

    def begin(self, *, aside: bool = False) -> None:
        """Begin the broadcast of the first replica's values, ``aside`` from steps or in one. Does not wait."""
        for device in sorted({one.device for one in self._buffers}, key=str):
            buffers = tuple(one for one in self._buffers if one.device == device)
            packed = torch.cat([_bytes_of(one) for one in buffers])
            self._arriving.append((buffers, self._replicas.broadcast(packed, aside=aside)))

    def wait(self) -> None:
        """Wait for the first replica's values on other replicas, because F reads them next.

        Raises:
            PeerLostError: The first replica has failed; says why if it could report it.
        """
        if self._arriving and self._replicas.index > 0:
            self.end()

    def end(self) -> None:
        """Wait for the broadcasts under way; raises as :meth:`wait`."""
        arriving, self._arriving = self._arriving, []
        for buffers, message in arriving:
            packed = message.wait()
            if self._replicas.index == 0:
                continue
            parts = packed.split([_bytes_of(one).numel() for one in buffers])
            with torch.no_grad():
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as bytes, in the order of its dimensions."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
