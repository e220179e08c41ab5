"""Checks that all ranks call the same methods of a pipeline in the same order, and names the ranks that did not.

A rank that alone evaluates, saves or clips waits for the others, which wait for it in their next step. So each process counts
its calls.

A step may take a second or more. After a second in one call, a thread writes the last calls to the store. It then reads those
of the two neighbouring ranks of the job. Two neighbours suffice: if any two ranks differ, then some neighbours differ.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Final

from torch.distributed import DistError, Store

from adaptra.errors import ControlError, PeerLostError, PipelineError, TransportError
from adaptra.runtime.control_store.schema import decode, encode
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.control_store.stores import Connection
from adaptra.runtime.world.world import Attempt

COMPARE_SECONDS: Final = 1.0
"""Seconds that a call may take before the ranks compare. Each further comparison comes after twice the time."""

_INTERVAL: Final = 0.25
_KEPT: Final = 64
_WRITTEN: Final = 16
CHANGED_MODEL: Final = "a step after a change of its model"
"""The begin of the name of a call in which ranks compile anew; what has changed follows a colon."""

_OTHER_NAMES: Final = {"save_trace": "timeline"}
"""Names of methods that do the same on all ranks as the method that they call."""

logger = logging.getLogger(__name__)


class Calls:
    """The calls of one process. Starts a thread at once.

    Args:
        store: Shared by all ranks of the job, with a prefix of this pipeline.
        rank, ranks: This rank in the job, and the number of ranks.
        on_difference: Called once, on the thread, with the error that names the calls; it ends this rank's waits.

    Attributes:
        attempt: Returns the attempt of the calls. Ranks in different attempts do not compare theirs.
    """

    def __init__(self, store: Store, rank: int, ranks: int, on_difference: Callable[[PipelineError], object]) -> None:
        self._store = Connection(under("calls", store))
        self._rank = rank
        self._neighbours = sorted({(rank - 1) % ranks, (rank + 1) % ranks} - {rank})
        self._on_difference = on_difference
        self.attempt: Callable[[], Attempt] = Attempt
        self._lock = threading.Lock()
        self._names: deque[str] = deque(maxlen=_KEPT)
        self._number = 0
        self._written = ""
        self._compare_at: float | None = None
        self._depth = 0
        self._ended = threading.Event()
        self._is_stuck = False
        self._thread = threading.Thread(target=self._run, name=f"adaptra-calls-{rank}", daemon=True)
        self._thread.start()

    def begin(self, processes: Sequence[int], attempt: Callable[[], Attempt]) -> None:
        """Compare calls with those processes of another world from now on. In a later epoch they are counted anew."""
        number, count = processes.index(self._rank), len(processes)
        with self._lock:
            if attempt().epoch > self.attempt().epoch:
                self._number = self._depth
                self._names.clear()
            self._neighbours = sorted({processes[(number + side) % count] for side in (-1, 1)} - {self._rank})
            self.attempt = attempt

    @contextmanager
    def during(self, name: str) -> Generator[None]:
        """Count a call that all ranks make together. A call within another call belongs to the outer one."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._begin(name)
                self._compare_at = time.monotonic() + COMPARE_SECONDS
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if not self._depth:
                    self._compare_at = None

    def explain(self, error: Exception, is_known: Callable[[], bool]) -> Exception:
        """Return the difference in calls that explains why a message could not be exchanged, or ``error`` if there is none.

        Waits for the neighbours' calls a little longer than each neighbour waits before it writes them. It waits no longer once
        ``is_known`` is true, because the cause is another one.
        """
        # A sum's connection also breaks where a rank ends its waits because of such a difference.
        is_lost = isinstance(error, PeerLostError) and not isinstance(error.__cause__, RuntimeError)
        if not isinstance(error, TransportError) or is_lost:
            return error
        differences: list[PipelineError] = []

        def compare() -> None:
            deadline = time.monotonic() + 2 * COMPARE_SECONDS
            try:
                self._write()
                while time.monotonic() < deadline and not is_known() and not self._ended.wait(_INTERVAL):
                    for neighbour in self._neighbours:
                        self._compare(neighbour)
            except PipelineError as difference:
                differences.append(difference)

        self._within(3 * COMPARE_SECONDS, compare, is_known)
        return differences[0] if differences else error

    def ahead(self, ranks: Sequence[int]) -> list[int]:
        """Return which of these ranks have begun a call that this rank has not. A rank tells of a call after a second in it."""
        ranks_ahead: list[int] = []
        for rank in ranks:
            if self._store.check([key := self._key(rank)]):
                number = decode(self._store.get(key), f"calls of rank {rank}").whole("number")
                if number > self._number:
                    ranks_ahead.append(rank)
        return ranks_ahead

    def interrupt(self) -> None:
        """Make a request that is stuck again over another connection."""
        self._store.interrupt()

    def close(self, *, informs: bool = False) -> None:
        """End the thread. May be called again.

        Args:
            informs: True to inform a rank that still waits for this one.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        if informs:
            with self._lock:
                self._begin("close")
            self._within(COMPARE_SECONDS, self._write)
        if threading.current_thread() is not self._thread:
            self._thread.join(COMPARE_SECONDS)
            if not self._thread.is_alive() and not self._is_stuck:
                self._store.close()

    def _begin(self, name: str) -> None:
        self._number += 1
        self._names.append(name)

    def _run(self) -> None:
        waited = COMPARE_SECONDS
        try:
            while not self._ended.wait(_INTERVAL):
                now = time.monotonic()
                with self._lock:
                    is_due = self._compare_at is not None and now >= self._compare_at
                    number = self._number
                if not is_due:
                    continue
                self._write()
                for neighbour in self._neighbours:
                    self._compare(neighbour)
                with self._lock:
                    if self._compare_at is not None and self._number == number:
                        self._compare_at = now + waited
                        waited *= 2
                    else:
                        waited = COMPARE_SECONDS
        except PipelineError as error:
            self._on_difference(error)
        except ControlError as error:
            logger.warning("rank %d compares calls no more: %s", self._rank, error)
        except DistError as error:
            # The membership reports a lost store or a lost rank to every waiting thread.
            logger.debug("rank %d compares calls no more: %s", self._rank, error)

    def _within(self, seconds: float, ask: Callable[[], None], is_over: Callable[[], bool] = lambda: False) -> None:
        """Call ``ask`` and wait at most ``seconds`` for it, because a store that has stalled never answers."""

        def asking() -> None:
            try:
                ask()
            except (DistError, ControlError) as error:
                logger.debug("rank %d can't compare calls: %s", self._rank, error)

        thread = threading.Thread(target=asking, name=f"adaptra-calls-{self._rank}-once", daemon=True)
        thread.start()
        deadline = time.monotonic() + seconds
        while thread.is_alive() and not is_over() and (left := deadline - time.monotonic()) > 0:
            thread.join(min(left, _INTERVAL))
        self._is_stuck |= thread.is_alive()

    def _write(self) -> None:
        with self._lock:
            calls = {"number": self._number, "names": list(self._names)[-_WRITTEN:]}
        before, self._written = self._written, self._key(self._rank)
        self._store.set(self._written, encode(calls))
        if before not in ("", self._written):
            self._store.delete_key(before)

    def _key(self, rank: int) -> str:
        return f"{self.attempt()}/{rank}"

    def _compare(self, neighbour: int) -> None:
        if not self._store.check([key := self._key(neighbour)]):
            return
        fields = decode(self._store.get(key), f"calls of rank {neighbour}")
        number = fields.whole("number")
        names = [str(one) for one in fields.items("names")]
        fields.end()
        theirs = dict(zip(count(number - len(names)), names, strict=False))
        with self._lock:
            own = dict(zip(count(self._number - len(self._names)), self._names, strict=False))
        for index in sorted(own.keys() & theirs.keys()):
            if _kind(own[index]) != _kind(theirs[index]):
                (first, what), (second, other) = sorted([(self._rank, own[index]), (neighbour, theirs[index])])
                if CHANGED_MODEL in (_kind(what), _kind(other)):
                    raise PipelineError(
                        f"rank {first} called {what}, rank {second} {other}: expected the same changes on every rank, between "
                        "the same two steps; pipe.parameters() has this rank's stages alone, so call requires_grad_ of the "
                        "model's parameters"
                    )
                raise PipelineError(
                    f"rank {first} called {what}, rank {second} {other}: expected the same calls in the same order on all "
                    "ranks; call it on all of them, not under 'if rank == 0', and let one use what it returns"
                )


def _kind(name: str) -> str:
    name = name.partition(":")[0]
    return _OTHER_NAMES.get(name, name)
