"""The receive buffers of one rank: those of messages that are always expected, and those that its programs take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import reduce
from operator import or_

from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.worker.step.shapes import FIRST

Counts = Mapping[tuple[int, MessageSpec], int]
"""Numbers of buffers per source and message."""


def by_worker(transport: Transport, counts: Counts) -> Counter[tuple[int, MessageSpec]]:
    """Return counts per source rank of a transport's pipeline as counts per source worker of the job."""
    return Counter({(transport.worker_of(rank), specs): count for (rank, specs), count in counts.items()})


class ReceivePool:
    """Reserves receive buffers at a job's transport.

    Programs run one at a time, so they share the buffers of whichever needs the most.

    Args:
        transport: This rank's transport, which joins the ranks of its pipeline.
        job: The transport of all workers of the job, of which that is a part; the same without replicas.
        always: Buffers of the messages that are not in a program, per source rank.
    """

    def __init__(self, transport: Transport, job: Transport, always: Counts) -> None:
        self._job = job
        self._always = by_worker(transport, always)
        self._by_shape: dict[int, Counter[tuple[int, MessageSpec]]] = {}

    def grow(self, counts: Counts, number: int = FIRST) -> None:
        """Grow the pool to the needs of a program, besides messages that are not in a program.

        Args:
            counts: Per source worker of the job.
            number: The number of the program's shape.
        """
        self._by_shape[number] = self._by_shape.get(number, Counter()) | Counter(counts)
        self._reserve(Counter())

    def lend(self, counts: Counts) -> None:
        """Add buffers, per source worker of the job, until the pool changes again."""
        self._reserve(Counter(counts))

    def shrink(self, number: int) -> None:
        """Give back the buffers of a shape."""
        self._by_shape.pop(number, None)
        self._reserve(Counter())

    def _reserve(self, lent: Counter[tuple[int, MessageSpec]]) -> None:
        by_program = reduce(or_, self._by_shape.values(), Counter[tuple[int, MessageSpec]]())
        self._job.reserve(self._always + by_program + lent)
