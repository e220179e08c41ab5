"""What a supervisor tells of its processes' ends, and hears of others': in a thread, as the store may be late or slow."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from torch.distributed import DistError, Store

from adaptra.errors import ControlError
from adaptra.runtime.survival.ends import Ends

_PATIENCE: Final = 2.0
"""Seconds for which the end of the thread is awaited; a store that does not answer holds it."""


class ToldEnds:
    """The ends of a job's processes, for the supervisor of some of them. Starts its thread at once.

    Args:
        open_store: Returns a client of the job's store, once it is there.

    Attributes:
        ended: The processes of the job that have ended, as far as known.
        outlived: Those that the job has gone on without.
    """

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self.ended: Final[set[int]] = set()
        self.outlived: Final[set[int]] = set()
        self._open_store = open_store
        self._to_tell: SimpleQueue[tuple[int, str] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="adaptra ends", daemon=True)
        self._thread.start()

    def tell(self, process: int, how: str) -> None:
        """Tell how a process has ended. Never waits."""
        self.ended.add(process)
        self._to_tell.put((process, how))

    def close(self) -> None:
        """Wait until all is told and heard, for seconds at most."""
        self._to_tell.put(None)
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        with contextlib.suppress(DistError, ControlError):  # where the store is gone nobody listens
            ends = Ends(self._open_store(), lambda process, _: self.ended.add(process), self.outlived.add)
            while (one := self._to_tell.get()) is not None:
                ends.tell(*one)
            ends.close()
