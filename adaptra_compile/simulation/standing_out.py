"""Outlier edges of a measured step, and links of workers, to be marked in pictures and traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median, median_low
from typing import Final

from adaptra.program import Kind
from adaptra.simulation.timeline import MessageInterval, Source, Timeline

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


def slow_in(timeline: Timeline, edges: Iterable[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    """Return those of some edges that may be called slow in a timeline.

    In a measured one their median message took over F / 10. A simulated one is believed.
    """
    if timeline.source is not Source.MEASURED:
        return frozenset(edges)
    flights = _flights(timeline, lambda message: (message.source, message.destination))
    least = _PART_OF_FORWARD * _mean_forward(timeline)
    return frozenset(edge for edge in edges if edge in flights and median(flights[edge]) > least)


def _slow(timeline: Timeline, ends_of: Callable[[MessageInterval], tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    flights = _flights(timeline, ends_of)
    forward = _mean_forward(timeline)
    if not flights or not forward:
        return ()
    usual = median_low([min(some) for some in flights.values()])
    least = max(_TIMES_USUAL * usual, _PART_OF_FORWARD * forward)
    return tuple(sorted(edge for edge, some in flights.items() if median(some) > least))


def _flights(
    timeline: Timeline, ends_of: Callable[[MessageInterval], tuple[int, int]]
) -> Mapping[tuple[int, int], Sequence[float]]:
    """Return the flights of messages between stages. Those between workers of one stage are of other sizes."""
    flights: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for message in timeline.messages:
        if message.source != message.destination:
            flights[ends_of(message)].append(message.arrived - message.departed)
    return flights


def _mean_forward(timeline: Timeline) -> float:
    forwards = [interval.end - interval.start for interval in timeline if interval.op.kind is Kind.F]
    return mean(forwards) if forwards else 0.0
