"""The recorder: takes the records of a process's ranks, and passes them to the sinks on a thread of its own.

A record costs a rank an entry in a queue, so no step waits for a disk, a network or a user's function. The first exception of a
sink is logged, and no exception ends anything: telemetry never stops training. The queue is bounded: if a sink is stuck,
further records are dropped and counted.
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
"""The largest number of records that wait for the sinks."""

CLOSE_SECONDS: Final = 5.0
"""The longest time that closing waits for the sinks, seconds."""

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A receiver of records. Its methods are called on the recorder's thread; the first exception that they raise is logged.

    Attributes:
        follows_steps: True if it wants the records of steps now; if no sink does, they are not even made.
    """

    @property
    def follows_steps(self) -> bool:
        """True if the sink wants the records of steps now."""
        ...

    def take(self, timestamped: TimestampedRecord) -> None:
        """Take the next record."""
        ...

    def close(self) -> None:
        """Write buffered records, and release all resources."""
        ...


class Recorder:
    """The records of one process's ranks. Any thread may call its methods.

    Args:
        sinks: The receivers, in this order. They are closed with the recorder.
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
        """True if a sink wants the records of steps."""
        return any(sink.follows_steps for sink in self._sinks)

    def record(self, records: Callable[[], Iterable[Record]]) -> None:
        """Pass the records that ``records()`` makes to the sinks; it is called on the recorder's thread."""
        if self._queue.qsize() < MOST_WAITING and not self._is_closed:
            self._queue.put((time.time(), records))
        else:
            self._dropped += 1

    def close(self) -> None:
        """Pass on the remaining records, and close the sinks. Waits for seconds at most; may be called again."""
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
