"""The sum of one rank's gradients over the replicas, which begins while the rank's last W still runs.

W hands gradients over one by one, see :meth:`adaptra.graph.stages.stages.TrainStage.weight_grad_in_turn`. As soon as those of a
bucket are complete, a thread adds them over the replicas. All replicas take the gradients in one order, whichever are complete
first. So the bits and the messages are those of a sum at the end of the step.

On a GPU that thread has a stream of its own, which waits for the event behind a bucket's last W. Only this thread waits for
what crosses to the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from queue import SimpleQueue
from typing import Any, Final

import torch
from torch import Tensor

from adaptra.profiled import named
from adaptra.runtime.data_parallel.accumulators import Accumulators
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.data_parallel.sum_norms import SumNorms
from adaptra.runtime.devices.events import recorded


class _ClosedError(Exception):
    """The step has failed, so its gradients will not be complete."""


class _InOrder:
    """The gradients of a step, which another thread takes in their order as they are complete.

    Those of a GPU are handed over in portions of a bucket, each with an event behind it.

    Args:
        sums: Those of this replica, of the trainable parameters of this rank's stages.
        late: The names of those whose gradients are complete only at the end of a step.
        bucket: The most bytes of gradients that travel as one tensor.

    Attributes:
        order: The names of the parameters in this order.
        parameters: The parameters.
        stream: The other thread's stream of the GPU; None on a CPU.
    """

    def __init__(self, sums: Accumulators, late: Collection[str], bucket: int) -> None:
        # The backward pass computes the last layer's gradients first.
        self.order: Final = [*(name for name in reversed([*sums.parameters]) if name not in late), *sorted(late)]
        self.parameters: Final = [sums.parameters[name] for name in self.order]
        self.stream: Final = next((torch.cuda.Stream(one.device) for one in self.parameters if one.is_cuda), None)
        self._sums = sums
        self._bucket = bucket
        self._changed = threading.Condition()
        self._complete: set[str] = set()
        # How many gradients, in order, are computed once the device has passed an event.
        self._computed: list[tuple[int, torch.cuda.Event]] = []
        self._count = self._handed_over = self._nbytes = 0
        self._is_closed = False

    @property
    def fills_a_bucket(self) -> bool:
        """Whether gradients for a bucket are complete."""
        return self._nbytes >= self._bucket

    def begin_step(self) -> None:
        """Start a step, in which no gradient is complete yet."""
        self._complete.clear()
        self._computed.clear()
        self._count = self._handed_over = self._nbytes = 0

    def complete(self, name: str) -> None:
        """Record that a gradient is complete, or queued on this thread's stream."""
        with self._changed:
            self._complete.add(name)
            while self._count < len(self.order) and self.order[self._count] in self._complete:
                self._nbytes += self.parameters[self._count].nbytes
                self._count += 1
            if self.stream is None or self._nbytes >= self._bucket * (len(self._computed) + 1):
                self._hand_over()

    def complete_all(self) -> None:
        """Record that all gradients are complete, or queued on this thread's stream."""
        with self._changed:
            self._count = len(self.order)
            self._hand_over()

    def close(self) -> None:
        """End the other thread's wait. There is no later step."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _hand_over(self) -> None:
        if self.stream is not None:
            # Sums that W made none of are made here: it is this thread's stream that uses their memory later.
            for name in self.order[self._handed_over : self._count]:
                self._sums.total(name)
            self._computed.append((self._count, recorded(torch.cuda.current_stream(self.stream.device))))
        self._handed_over = self._count
        self._changed.notify()

    def take(self, number: int) -> Tensor:
        """Wait until a gradient is complete, and all before it. It is zeros if only others have one.

        On a GPU the other thread's stream waits for it, not the host.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._handed_over > number or self._is_closed)
            if self._handed_over <= number:
                raise _ClosedError
            computed = next((event for count, event in self._computed if count > number), None)
        if self.stream is not None and computed is not None:
            self.stream.wait_event(computed)
        return self._sums.total(self.order[number])


class GradientSum:
    """Sums up the gradients of a step, in the thread of steps or beside it; those of a GPU always beside it.

    Args:
        replicas: The ranks that have copies of these stages.
        sums: Those of this replica, of the trainable parameters of this rank's stages.
        late: The names of those whose gradients are complete only at the end of a step.
        bucket: The most bytes of gradients that travel as one tensor.
        mean: Whether the sum is divided by the number of replicas.
        mark: The present time on this rank's device, as :meth:`adaptra.runtime.devices.device_clock.OpClock.mark`.
        norms: Takes the norms of terms and results; None for none.
    """

    def __init__(
        self,
        replicas: Replicas,
        sums: Accumulators,
        late: Collection[str],
        bucket: int,
        mean: bool,
        mark: Callable[[], Any],
        norms: SumNorms | None = None,
    ) -> None:
        self._replicas = replicas
        self._gradients = _InOrder(sums, late, bucket)
        self._stream = self._gradients.stream
        self._bucket = bucket
        self._mean = mean
        self._mark = mark
        self._norms = norms
        self._owners: list[int] = []
        self._has_begun = False
        self._begin: SimpleQueue[bool] = SimpleQueue()
        self._ended: SimpleQueue[tuple[Any, Any, int] | Exception] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def overlaps(self) -> bool:
        """Whether there are buckets that can travel before all gradients are complete."""
        return sum(one.nbytes for one in self._gradients.parameters) > self._bucket

    def bring_to(self, owners: Mapping[str, int]) -> None:
        """Bring the sum of each parameter to the replica that owns it, from the next step on, and to no other."""
        self._owners = [owners[name] for name in self._gradients.order]

    def begin_step(self) -> None:
        """Start a step, in which no gradient is complete yet."""
        self._gradients.begin_step()
        self._has_begun = False
        if self._norms is not None:
            self._norms.begin_step()

    def complete(self, name: str) -> None:
        """Record that the gradient of a parameter is complete, and begin the sum once a bucket is."""
        self._gradients.complete(name)
        if self._gradients.fills_a_bucket and not self._has_begun:
            self._begin_sum()

    def end_step(self) -> tuple[Any, Any, int]:
        """Wait for the sum of all gradients, which are complete now, or queued on this thread's stream.

        Returns:
            The marks of its beginning and its end, and the bytes of the gradients.

        Raises:
            PeerLostError: As :meth:`.gradient_averaging.Replicas.combine_gradients`.
        """
        self._gradients.complete_all()
        if not self._has_begun:
            if self._stream is None:
                return self._sum()
            self._begin_sum()
        ended = self._ended.get()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        if isinstance(ended, Exception):
            raise ended
        return ended

    def close(self) -> None:
        """End the thread, and its wait for the gradients of a step that has failed. There is no later step."""
        self._gradients.close()
        self._begin.put(False)

    def _begin_sum(self) -> None:
        self._has_begun = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adaptra-gradient-sum", daemon=True)
            self._thread.start()
        self._begin.put(True)

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)
            torch.cuda.set_stream(self._stream)
        while self._begin.get():
            try:
                self._ended.put(self._sum())
            except Exception as error:
                self._ended.put(error)

    def _sum(self) -> tuple[Any, Any, int]:
        parameters, order, get = self._gradients.parameters, self._gradients.order, self._gradients.take
        if self._norms is not None:
            get = self._norms.of_terms(order, get)
        if self._stream is not None:
            self._gradients.take(0)  # a sum on a GPU begins behind its first bucket's W
        started = self._mark()
        with named("REDUCE"):
            nbytes = self._replicas.combine_gradients(parameters, get, mean=self._mean, owners=self._owners)
            if self._norms is not None:
                self._norms.end_sum(order, self._owners)
        return started, self._mark(), nbytes
