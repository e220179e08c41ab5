"""Clock drift between two ranks, taken out of the measured flights of messages.

A message's flight is the receiver's clock at its arrival minus the sender's clock at its departure. The clocks are compared
once, when the ranks connect (:mod:`adaptra.runtime.transports.clock_offset`). If the receiver's clock gains x seconds after
that, flights towards it grow by x and flights away from it shrink by x. Their sum stays the same.

No link gets slower in one direction by exactly as much as it gets faster in the other. A change that keeps the sum is therefore
clock drift, and any other change is the link's.

Every step sends messages both ways, so every step is a two-way exchange. The drift is known as exactly as these flights
scatter. No exchange can separate an offset from a latency that differed by direction from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from adaptra.runtime.detection.measurement import EdgeMeasurement


class ClockDrift:
    """Tracks the clock drift across every link between neighbouring stages."""

    def __init__(self) -> None:
        self._gained: dict[int, float] = {}

    def gained(self, stage: int) -> float:
        """Return the seconds that the clock of stage + 1 has gained on that of ``stage`` since calibration."""
        return self._gained.get(stage, 0.0)

    def correct(
        self,
        edges: Iterable[EdgeMeasurement],
        levels: Mapping[tuple[int, int], float],
        limit: Callable[[tuple[int, int]], float],
    ) -> tuple[EdgeMeasurement, ...]:
        """Correct the flights of a step for clock drift.

        Args:
            edges: The step's measurements.
            levels: The known flight of each directed edge, seconds. Edges without one are not corrected.
            limit: Returns how far an edge's flight may differ from its level by noise alone, seconds.

        Returns:
            The measurements with flights as one clock would show them, none below zero.
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
