"""The inputs or targets of the microbatches that others may take, which every replica sends to all others as a step begins.

A replica that pauses could not send them once they are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport


class SharedBatch:
    """Those of one stage.

    Args:
        purpose: Inputs or targets.
        stage: The stage that takes them.
        specs: The tensors of one microbatch; none if there is nothing to send.
        shared: The microbatches of each replica that others may take.
        workers: The worker that has the stage, by replica.
        job: Joins these.
        device: The device of the stage.
        timeout: Seconds to wait for the others'.
    """

    def __init__(
        self,
        purpose: Purpose,
        stage: int,
        specs: MessageSpec,
        shared: range,
        workers: Sequence[int],
        job: Transport,
        device: torch.device,
        timeout: float,
    ) -> None:
        self._purpose = purpose
        self._stage = stage
        self._specs: Final[MessageSpec] = tuple(specs)
        self._shared = shared
        self._others = {replica: worker for replica, worker in enumerate(workers) if worker != job.rank and specs}
        self._replica = list(workers).index(job.rank)
        self._job = job
        self._device = device
        self._timeout = timeout
        self._arriving: dict[int, Pending] = {}

    def receive_counts(self) -> dict[tuple[int, MessageSpec], int]:
        """Return the number of receive buffers needed at a time, per source worker and message."""
        return {(worker, self._specs * len(self._shared)): 1 for worker in self._others.values()}

    def begin_step(self, step: int, batch: Sequence[Sequence[Tensor]] | None) -> None:
        """Send this replica's to all others.

        Args:
            step: The step.
            batch: The tensors per microbatch, or None if nobody may take any in this step.
        """
        if batch is None:
            empty = [self._device_of(spec.stays_on_host) for spec in self._specs]
            tensors = [
                torch.zeros(spec.shape, dtype=spec.dtype, device=device)
                for _ in self._shared
                for spec, device in zip(self._specs, empty, strict=True)
            ]
        else:
            tensors = [one for microbatch in self._shared for one in batch[microbatch]]
        for worker in self._others.values():
            self._job.send(worker, self._identity(step, self._replica), tensors)
        self._arriving = {
            replica: self._job.receive(worker, self._identity(step, replica)) for replica, worker in self._others.items()
        }

    def has(self, replica: int) -> bool:
        """Return whether those of another replica have arrived."""
        return replica not in self._others or self._arriving[replica].done

    def of(self, replica: int, microbatch: int) -> Sequence[Tensor]:
        """Return those of a microbatch of another replica, once they have arrived."""
        if replica not in self._others:
            return ()
        count, tensors = len(self._specs), self._arriving[replica].wait(self._timeout)
        first = self._shared.index(microbatch) * count
        return tensors[first : first + count]

    def end_step(self) -> None:
        """Wait until all have arrived, and keep none."""
        for pending in self._arriving.values():
            pending.wait(self._timeout)
            self._job.release(pending)
        self._arriving = {}

    def _device_of(self, stays_on_host: bool) -> torch.device:
        return torch.device("cpu") if stays_on_host else self._device

    def _identity(self, step: int, replica: int) -> Identity:
        specs = self._specs * len(self._shared)
        return Identity(step, self._purpose, self._stage, self._stage, self._shared.start, specs, replica)
