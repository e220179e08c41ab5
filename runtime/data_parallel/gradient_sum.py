"""The sum of one rank's gradients over the replicas, which begins while the rank's last W still runs.

W hands gradients over one by one, see :meth:`adaptra.graph.stages.stages.TrainStage.weight_grad_in_turn`. As soon as those of a
bucket are complete, a thread adds them over the replicas. All replicas take the gradients in one order, whichever are complete
first. So the bits and the messages are those of a sum at the end of the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from adaptra.profiled import named
from adaptra.runtime.data_parallel.accumulators import Accumulators
from adaptra.runtime.data_parallel.gradient_averaging import Replicas


class _ClosedError(Exception):
    """The step has failed, so its gradients will not be complete."""


class GradientSum:
    """Sums up the gradients of a step, in the thread of steps or beside it.

    Args:
        replicas: The ranks that have copies of these stages.
        sums: Those of this replica, of the trainable parameters of this rank's stages.
        late: The names of those whose gradients are complete only at the end of a step.
        bucket: The most bytes of gradients that travel as one tensor.
        mean: Whether the sum is divided by the number of replicas.
        mark: The present time on this rank's device, as :meth:`adaptra.runtime.devices.device_clock.OpClock.mark`.
    """

    def __init__(
        self,
        replicas: Replicas,
        sums: Accumulators,
        late: Collection[str],
        bucket: int,
        mean: bool,
        mark: Callable[[], Any],
    ) -> None:
        self._replicas = replicas
        # The backward pass computes the last layer's gradients first.
        self._order = [*(name for name in reversed([*sums.parameters]) if name not in late), *sorted(late)]
        self._sums = sums
        self._bucket = bucket
        self._mean = mean
        self._mark = mark
        self._changed = threading.Condition()
        self._complete: set[str] = set()
        self._count = self._nbytes = 0
        self._is_closed = self._has_begun = False
        self._begin: SimpleQueue[bool] = SimpleQueue()
        self._ended: SimpleQueue[tuple[Any, Any, int] | Exception] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def overlaps(self) -> bool:
        """Whether there are buckets that can travel before all gradients are complete; a GPU's sums follow its last W."""
        parameters = self._sums.parameters.values()
        return all(one.device.type == "cpu" for one in parameters) and sum(one.nbytes for one in parameters) > self._bucket

    def begin_step(self) -> None:
        """Start a step, in which no gradient is complete yet."""
        self._complete.clear()
        self._count = self._nbytes = 0
        self._has_begun = False

    def complete(self, name: str) -> None:
        """Record that the gradient of a parameter is complete, and begin the sum once a bucket is."""
        with self._changed:
            self._complete.add(name)
            while self._count < len(self._order) and self._order[self._count] in self._complete:
                self._nbytes += self._sums.parameters[self._order[self._count]].nbytes
                self._count += 1
            self._changed.notify()
        if self._nbytes >= self._bucket and not self._has_begun:
            self._has_begun = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="adaptra-gradient-sum", daemon=True)
                self._thread.start()
            self._begin.put(True)

    def end_step(self) -> tuple[Any, Any, int]:
        """Wait for the sum of all gradients, which are complete now.

        Returns:
            The marks of its beginning and its end, and the bytes of the gradients.

        Raises:
            PeerLostError: As :meth:`.gradient_averaging.Replicas.combine_gradients`.
        """
        with self._changed:
            self._count = len(self._order)
            self._changed.notify()
        if not self._has_begun:
            return self._sum()
        ended = self._ended.get()
        if isinstance(ended, Exception):
            raise ended
        return ended

    def close(self) -> None:
        """End the thread, and its wait for the gradients of a step that has failed. There is no later step."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._begin.put(False)

    def _run(self) -> None:
        while self._begin.get():
            try:
                self._ended.put(self._sum())
            except Exception as error:
                self._ended.put(error)

    def _sum(self) -> tuple[Any, Any, int]:
        parameters = [self._sums.parameters[name] for name in self._order]
        started = self._mark()
        with named("REDUCE"):
            nbytes = self._replicas.combine_gradients(parameters, self._complete_sum, mean=self._mean)
        return started, self._mark(), nbytes

    def _complete_sum(self, number: int) -> Tensor:
        """Wait until the gradient of a parameter is complete, and of all before it. It is zeros if only others have one."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > number or self._is_closed)
            if self._count <= number:
                raise _ClosedError
        return self._sums.total(self._order[number])
