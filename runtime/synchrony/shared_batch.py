"""The inputs and targets of the microbatches that others may take, which every replica sends to all others as a step begins.

A replica that pauses could not send them once they are wanted. They are handed to the transport beside the first ops, as that
takes a while for many replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Final

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.step_messages.stride_numbers import StrideNumbers
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport


class SharedBatch:
    """Those of one stage. Between two workers that share a batch, nothing else of its channel may be sent within a step.

    Args:
        stage: The stage that takes them.
        inputs, targets: The tensors of one microbatch; none where the stage takes none.
        shared: The microbatches of each replica that others may take.
        workers: The worker that has the stage, by replica.
        job: Joins these.
        device: The device of the stage.
        timeout: Seconds to wait for the others'.
    """

    def __init__(
        self,
        stage: int,
        inputs: MessageSpec,
        targets: MessageSpec,
        shared: range,
        workers: Sequence[int],
        job: Transport,
        device: torch.device,
        timeout: float,
    ) -> None:
        self._stage = stage
        self._inputs: Final[MessageSpec] = tuple(inputs)
        self._taken: Final[MessageSpec] = (*inputs, *targets)
        self._strides = StrideNumbers(self._taken)
        self._specs: Final[MessageSpec] = self._strides.specs
        self._shared = shared
        self._others = {replica: worker for replica, worker in enumerate(workers) if worker != job.rank and self._specs}
        self._replica = list(workers).index(job.rank)
        self._job = job
        self._device = device
        self._timeout = timeout
        # The thread must not wait for ops that are queued meanwhile.
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "adaptra-shared-batch")
        self._arriving: Future[dict[int, Pending]] = Future()
        self._arriving.set_result({})

    def receive_counts(self) -> dict[tuple[int, MessageSpec], int]:
        """Return the number of receive buffers needed at a time, per source worker and message."""
        return {(worker, self._specs * len(self._shared)): 1 for worker in self._others.values()}

    def begin_step(self, step: int, inputs: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]]) -> None:
        """Send this replica's to all others.

        Args:
            step: The step.
            inputs, targets: The tensors per microbatch, where the stage takes any.
        """
        takes_inputs, takes_targets = bool(self._inputs), len(self._taken) > len(self._inputs)
        self._begin(
            step,
            [
                (*(inputs[microbatch] if takes_inputs else ()), *(targets[microbatch] if takes_targets else ()))
                for microbatch in self._shared
            ],
        )

    def begin_closed_step(self, step: int) -> None:
        """Send all others zeros, as nobody may take any in this step."""
        zeros = [
            torch.zeros(spec.shape, dtype=spec.dtype, device=torch.device("cpu") if spec.stays_on_host else self._device)
            for spec in self._taken
        ]
        self._begin(step, [zeros for _ in self._shared])

    def has(self, replica: int) -> bool:
        """Return whether those of another replica have arrived."""
        return replica not in self._others or (self._arriving.done() and self._arriving.result()[replica].done)

    def inputs_of(self, replica: int, microbatch: int) -> Sequence[Tensor]:
        """Return the inputs of a microbatch of another replica, once they have arrived."""
        return self._of(replica, microbatch)[: len(self._inputs)]

    def targets_of(self, replica: int, microbatch: int) -> Sequence[Tensor]:
        """Return the targets of a microbatch of another replica, once they have arrived."""
        return self._of(replica, microbatch)[len(self._inputs) :]

    def end_step(self) -> None:
        """Wait until all are sent and have arrived, and keep none."""
        for pending in self._arriving.result().values():
            pending.wait(self._timeout)
            self._job.release(pending)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _begin(self, step: int, microbatches: Sequence[Sequence[Tensor]]) -> None:
        if not self._others:
            return
        tensors = [tensor for microbatch in microbatches for tensor in self._strides.beside(microbatch)]
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(self._device))
        self._arriving = self._thread.submit(self._exchange, step, tensors)

    def _exchange(self, step: int, tensors: Sequence[Tensor]) -> dict[int, Pending]:
        with nullcontext() if self._beside is None else torch.cuda.stream(self._beside):
            for worker in self._others.values():
                self._job.send(worker, self._identity(step, self._replica), tensors)
            return {
                replica: self._job.receive(worker, self._identity(step, replica)) for replica, worker in self._others.items()
            }

    def _of(self, replica: int, microbatch: int) -> Sequence[Tensor]:
        if replica not in self._others:
            return ()
        count, tensors = len(self._specs), self._arriving.result()[replica].wait(self._timeout)
        first = self._shared.index(microbatch) * count
        return self._strides.restore(tensors[first : first + count])

    def _identity(self, step: int, replica: int) -> Identity:
        purpose = Purpose.INPUT if self._inputs else Purpose.TARGET
        specs = self._specs * len(self._shared)
        return Identity(step, purpose, self._stage, self._stage, self._shared.start, specs, replica)
