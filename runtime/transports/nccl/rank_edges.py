"""The ends of all edges of one rank in one attempt, with their communicators.

A thread makes the communicators one after the other, in the order of :func:`.edges.edges_of`. It asks the store whether the
other rank is there before NCCL waits for it, so that an abort ends that wait. No message is under way until all of
a rank's communicators are made. Making one may wait for all that its device has to do.

Those of the attempt before end once all neighbours have begun this one. Else a neighbour that has not would take the end for a
loss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch.distributed import Store

from adaptra.errors import TransportError
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.transports.nccl.communicator import Communicator
from adaptra.runtime.transports.nccl.edge_end import EdgeEnd
from adaptra.runtime.transports.nccl.edges import Edge
from adaptra.runtime.transports.process_groups import Members

logger = logging.getLogger(__name__)

_LEAST_PAUSE_SECONDS: Final = 0.001
_MOST_PAUSE_SECONDS: Final = 0.1
_END_SECONDS: Final = 5.0


class RankEdges:
    """Makes one rank's communicators in the background.

    Args:
        ends: This rank's ends, in the order in which all ranks make communicators.
        members: This rank among all, under a name of this attempt.
        store: The keys under that name.
        device: The GPU of this rank.
        on_error: Called with an error that kept one from being made, on the thread.
        before: Those of the attempt before, which this one ends; None for the first.
    """

    def __init__(
        self,
        ends: Mapping[Edge, EdgeEnd],
        members: Members,
        store: Store,
        device: torch.device,
        on_error: Callable[[Exception], None],
        before: RankEdges | None = None,
    ) -> None:
        self.ends: Final = dict(ends)
        self._members = members
        self._store = store
        self._device = device
        self._on_error = on_error
        self._before = before
        self._lock = threading.Lock()
        self._made: dict[Edge, Communicator] = {}
        self._error: Exception | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._make_all, name=f"adaptra rank {members.rank} connects", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all are made.

        Raises:
            Exception: The reason why one could not be made.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def end(self, why: Exception, *, is_idle: bool) -> None:
        """End the communicators in the background: at once, or as NCCL does when all operations have ended. Returns at once.

        Messages that are not under way fail for the reason given. Those that are end without success.
        """
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            communicators, before = list(self._made.values()), self._before
        if before is not None:
            before.end(why, is_idle=False)
        for end in () if is_idle else self.ends.values():
            end.refuse(why)
        self._endings = [
            threading.Thread(target=_end, args=(communicator, is_idle), name="adaptra ends a communicator", daemon=True)
            for communicator in communicators
        ]
        for thread in self._endings:
            thread.start()
        for end in self.ends.values():
            end.close()

    def join(self) -> None:
        """Wait for the end of the communicators and of all threads, for a few seconds at most."""
        deadline = time.monotonic() + _END_SECONDS
        for thread in (self._thread, *self._endings):
            thread.join(max(0.0, deadline - time.monotonic()))
        left = [thread.name for thread in (self._thread, *self._endings) if thread.is_alive()]
        for end in self.ends.values():
            left += end.join(max(0.0, deadline - time.monotonic()))
        if left:
            logger.warning("rank %d: NCCL does not end within %g s: %s", self._members.rank, _END_SECONDS, ", ".join(left))

    def _make_all(self) -> None:
        try:
            torch.cuda.set_device(self._device)  # each thread has a current device of its own
            for edge in self.ends:
                self._meet(edge)
            if self._before is not None:
                self._before.end(TransportError("a later attempt has begun"), is_idle=False)
                self._before.join()
                self._before = None
            for edge, end in self.ends.items():
                self._make(edge, end)
        except Exception as error:
            self._error = error
            for end in self.ends.values():
                end.refuse(error)
            if not self._has_ended:
                self._on_error(error)
            return
        for edge, end in self.ends.items():
            end.begin(self._made[edge])

    def _make(self, edge: Edge, end: EdgeEnd) -> None:
        store = under(str(edge), self._store)
        pair = Members(f"{self._members.name}/{edge}", edge[:2].index(self._members.rank), 2)
        communicator = Communicator(pair, under("nccl", store), self._device)
        with self._lock:
            self._raise_if_ended(edge)
            self._made[edge] = communicator
        communicator.connect()
        end.try_out(communicator)

    def _meet(self, edge: Edge) -> None:
        """Wait until the other rank of an edge is here too."""
        store = under(str(edge), self._store)
        (other,) = {*edge[:2]} - {self._members.rank}
        store.set(f"here/{self._members.rank}", "")
        pause = _LEAST_PAUSE_SECONDS
        while not store.check([f"here/{other}"]):
            self._raise_if_ended(edge)
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_SECONDS)

    def _raise_if_ended(self, edge: Edge) -> None:
        if self._has_ended:
            raise TransportError(f"edge {edge}: the transport has ended")


def _end(communicator: Communicator, is_idle: bool) -> None:
    try:
        if is_idle:
            communicator.shutdown()
        else:
            communicator.abort()
    except RuntimeError as error:
        logger.info("a communicator of NCCL ended: %s", error)
