"""The recorder: takes what the ranks of a process tell, and hands it to the sinks on a thread of its own.

Telling costs a rank an entry in a queue, so no step waits for a disk, a network or a user's function. What a sink raises is
logged, the first time, and ends nothing: telemetry never stops training. The queue is bounded: when a sink is stuck, what finds
no room is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final, Protocol

from adaptra.runtime.telemetry.records import Record, TimestampedRecord

MOST_WAITING: Final = 10_000
"""How many records wait for the sinks at most."""

CLOSE_SECONDS: Final = 5.0
"""How long closing waits for the sinks."""

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Who is told. Its methods are called on the recorder's thread; what they raise is logged once.

    Attributes:
        follows_steps: Whether it wants the records of steps now; if no sink does they are not even made.
    """

    @property
    def follows_steps(self) -> bool:
        """See above."""
        ...

    def take(self, told: TimestampedRecord) -> None:
        """Take the next record."""
        ...

    def close(self) -> None:
        """Take no more; write what is not written yet, and give back what was opened."""
        ...


class Recorder:
    """What the ranks of one process tell. Any thread may call its methods.

    Args:
        sinks: Who is told, in this order. They are closed with the recorder.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._broken: set[Sink] = set()
        self._dropped = 0
        self._queue: SimpleQueue[tuple[float, Callable[[], Iterable[Record]]] | None] = SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._hand_on, name="adaptra-telemetry", daemon=True)
        self._thread.start()

    @property
    def follows_steps(self) -> bool:
        """Whether a sink wants the records of steps."""
        return any(sink.follows_steps for sink in self._sinks)

    def tell(self, records: Callable[[], Iterable[Record]]) -> None:
        """Tell what ``records()`` makes; it is called on the recorder's thread."""
        if self._queue.qsize() < MOST_WAITING and not self._is_closed:
            self._queue.put((time.time(), records))
        else:
            self._dropped += 1

    def close(self) -> None:
        """Hand on what was told, and close the sinks. Waits for seconds at most; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)

    def _hand_on(self) -> None:
        while (entry := self._queue.get()) is not None:
            moment, make = entry
            try:
                for record in make():
                    for sink in self._sinks:
                        self._guarded(sink, partial(sink.take, TimestampedRecord(moment, record)))
            except Exception:
                logger.exception("telemetry: a record could not be made")
        for sink in self._sinks:
            self._guarded(sink, sink.close)
        if self._dropped:
            logger.warning("%d records were dropped: a sink was too slow or told after the end", self._dropped)

    def _guarded(self, sink: Sink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            if sink not in self._broken:
                self._broken.add(sink)
                logger.exception("telemetry: %s failed; training goes on, and further failures of it are not logged", sink)
