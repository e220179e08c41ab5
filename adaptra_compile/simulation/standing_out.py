"""Outlier edges of a measured step, and links of workers, to be marked in pictures and traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import mean, median, median_low
from typing import Final

from adaptra.program import Kind
from adaptra.simulation.timeline import MessageInterval, Timeline

_TIMES_USUAL: Final = 2.0
_PART_OF_FORWARD: Final = 0.1  # the same threshold as for a plan's slow edges


def slow_edges_of(timeline: Timeline) -> tuple[tuple[int, int], ...]:
    """Return the edges whose median message took over F / 10 and over twice the usual time.

    An edge is (sending stage, receiving stage).
    """
    return _slow(timeline, lambda message: (message.source, message.destination))


def slow_links_of(timeline: Timeline) -> tuple[tuple[int, int], ...]:
    """Return the same of links, which are (sending worker, receiving worker)."""
    return _slow(timeline, timeline.ends_of)


def _slow(timeline: Timeline, ends_of: Callable[[MessageInterval], tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    flights: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for message in timeline.messages:
        flights[ends_of(message)].append(message.arrived - message.departed)
    forwards = [interval.end - interval.start for interval in timeline if interval.op.kind is Kind.F]
    if not flights or not forwards:
        return ()
    usual = median_low([min(some) for some in flights.values()])
    least = max(_TIMES_USUAL * usual, _PART_OF_FORWARD * mean(forwards))
    return tuple(sorted(edge for edge, some in flights.items() if median(some) > least))
