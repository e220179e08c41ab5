"""Clocks that run apart: what two ranks' clocks have drifted since the start is taken out of the flights between them.

A message's flight is the receiver's clock at its arrival minus the sender's at its departure. The clocks are compared once,
when the ranks connect (:mod:`adaptra.runtime.transports.clock_offset`); a clock that gains x from then on lengthens the flights
towards it by x and shortens those away from it by as much, so their sum stays what it was. No link gets slower in one
direction by just what it gains in the other: a change that leaves the sum alone is the clocks', any other is the link's.
Messages of every step go both ways, so every step is a two-way exchange; what is left uncertain is the scatter of their
flights, and a latency that differs by direction from the start, which no exchange can tell from an offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from adaptra.runtime.detection.measurement import EdgeMeasurement


class ClockDrift:
    """Follows the clocks on both sides of every link between neighbouring stages."""

    def __init__(self) -> None:
        self._gained: dict[int, float] = {}

    def gained(self, stage: int) -> float:
        """How many seconds the clock of stage + 1 has gained on that of ``stage`` since its flights were calibrated."""
        return self._gained.get(stage, 0.0)

    def correct(
        self,
        edges: Iterable[EdgeMeasurement],
        levels: Mapping[tuple[int, int], float],
        limit: Callable[[tuple[int, int]], float],
    ) -> tuple[EdgeMeasurement, ...]:
        """The measurements of a step with flights as one clock would have them, none below zero.

        Args:
            edges: What was measured.
            levels: The flight known for every directed edge, seconds; edges without one are left alone.
            limit: By how much an edge's flight may differ from its level without meaning anything, seconds.
        """
        measured = {(edge.source, edge.destination): edge for edge in edges}
        for source, destination in measured:
            there, back = (source, destination), (destination, source)
            if source < destination and back in measured and there in levels and back in levels:
                later = measured[there].estimate.flight - levels[there]
                sooner = measured[back].estimate.flight - levels[back]
                if abs(later + sooner) <= limit(there) + limit(back):
                    self._gained[source] = (later - sooner) / 2
        return tuple(self._corrected(edge) for edge in measured.values())

    def _corrected(self, edge: EdgeMeasurement) -> EdgeMeasurement:
        gained = self.gained(min(edge.source, edge.destination))
        flight = edge.estimate.flight - (gained if edge.source < edge.destination else -gained)
        return replace(edge, estimate=replace(edge.estimate, flight=max(flight, 0.0)))
