"""A communication hook for DistributedDataParallel: ``ddp.register_comm_hook(HookState(), hook)``.

Each bucket is added in a thread while autograd computes the next one. DDP turns an error of a hook into a RuntimeError that has
its text alone; :attr:`HookState.error` keeps ours.
"""

# torch compares the annotations of a hook, so they are no texts here.
import threading
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup

from adaptra.errors import AdaptraError
from adaptra.reduction.functions import check_summand, described
from adaptra.reduction.peers import Peers
from adaptra.runtime.devices.events import recorded
from adaptra.runtime.options.reduce_options import Reduce

_Bucket = tuple[int, Tensor, Any, "torch.cuda.Event | None"]
"""The number of a bucket in its step, its gradients, the future of their mean, and the event behind their computation."""


class HookState:
    """The state of :func:`hook`: connections of its own, and a thread. All ranks make theirs at the same time.

    Args:
        group: The group of DistributedDataParallel; None for all ranks.
        how: How gradients are added; by default as ``adaptra.Reduce()``.

    Attributes:
        error: The error that refused a bucket or ended its sum, None while there was none.

    Raises:
        LaunchError: There is no process group, or this process is no member.
    """

    def __init__(self, group: ProcessGroup | None = None, how: Reduce | None = None) -> None:
        self.error: Exception | None = None
        self._peers: Final = Peers(group, how or Reduce())
        self._buckets: SimpleQueue[_Bucket | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="adaptra adds gradients of DDP", daemon=True)
        self._thread.start()

    def begin(self, number: int, gradients: Tensor) -> torch.futures.Future[Tensor]:
        """Begin to replace the gradients of a bucket by their mean, and return its future.

        Raises:
            BatchError: The gradients can't be added.
            LaunchError: The state is closed.
        """
        try:
            self._peers.require_open()
            with torch.inference_mode(False):  # as in the thread
                check_summand(gradients, mean=True)
        except AdaptraError as error:
            self.error = self.error or error
            raise
        on_gpu = gradients.is_cuda
        future: Any = torch.futures.Future(devices=[gradients.device]) if on_gpu else torch.futures.Future()
        computed = recorded(torch.cuda.current_stream(gradients.device)) if on_gpu else None
        self._buckets.put((number, gradients, future, computed))
        return future

    def close(self) -> None:
        """End the connections and the thread, once no sum is under way. May be called again."""
        self._buckets.put(None)
        self._thread.join()
        self._peers.close()

    def __enter__(self) -> Self:
        """Return the state."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close it."""
        self.close()

    def _run(self) -> None:
        stream: torch.cuda.Stream | None = None
        while (bucket := self._buckets.get()) is not None:
            number, gradients, future, computed = bucket
            try:
                if computed is not None:
                    stream = stream or torch.cuda.Stream(gradients.device)
                    torch.cuda.set_device(gradients.device)
                    torch.cuda.set_stream(stream)
                    stream.wait_event(computed)
                what = f"the mean of bucket {number} of gradients, {described(gradients)}"
                self._peers.combine(gradients, what, mean=True)
                future.set_result(gradients)
            except Exception as error:
                self.error = self.error or error
                future.set_exception(error)


def hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Replace a bucket's gradients by their mean over the ranks: the left fold in the ranks' order, divided by their number.

    Args:
        state: The first argument of ``register_comm_hook``.
        bucket: A bucket of gradients.

    Returns:
        The future of the mean. It raises the error that :attr:`HookState.error` has.
    """
    return state.begin(bucket.index(), bucket.buffer())
