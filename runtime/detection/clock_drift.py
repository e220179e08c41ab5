"""Clock drift between two ranks, taken out of the measured flights of messages.

A message's flight is the receiver's clock at its arrival minus the sender's clock at its departure. The clocks are compared
once, when the ranks connect (:mod:`adaptra.runtime.transports.clock_offset`). If the receiver's clock gains x seconds after
that, flights towards it grow by x and flights away from it shrink by x. Their sum stays the same.

No link gets slower in one direction by exactly as much as it gets faster in the other. A change that keeps the sum is therefore
clock drift, and any other change is the link's.

On a busy machine noise is large, and a change of one direction may keep the sum within it. Half of it would pass for drift, and
the other half would keep a wrong level. So drift is what clocks can gain in the time, or two opposite changes.

Every step sends messages both ways, so every step is a two-way exchange. The drift is known as exactly as these flights
scatter. No exchange can separate an offset from a latency that differed by direction from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from adaptra.runtime.measuring.measurement import EdgeMeasurement

FASTEST: Final = 1e-3
"""The largest drift of two clocks, as a fraction of the time: each is set right by 500 ppm at most while it runs."""

OPPOSITE: Final = 0.25
"""The most by which two opposite changes differ, as a fraction of what they are apart. It is 1 if one direction alone changes.

Clocks jump when a virtual machine pauses, and no time bounds that.
"""


class ClockDrift:
    """Tracks the clock drift across every link between neighbouring stages."""

    def __init__(self) -> None:
        self._gained: dict[int, float] = {}
        self._now = 0.0
        self._known_at: dict[int, float] = {}

    def gained(self, stage: int) -> float:
        """Return the seconds that the clock of stage + 1 has gained on that of ``stage`` since calibration."""
        return self._gained.get(stage, 0.0)

    def correct(
        self,
        edges: Iterable[EdgeMeasurement],
        levels: Mapping[tuple[int, int], float],
        limit: Callable[[tuple[int, int]], float],
        seconds: float,
    ) -> tuple[EdgeMeasurement, ...]:
        """Correct the flights of a step for clock drift.

        Args:
            edges: The step's measurements.
            levels: The known flight of each directed edge, seconds. Edges without one are not corrected.
            limit: Returns how far an edge's flight may differ from its level by noise alone, seconds.
            seconds: The time of the step.

        Returns:
            The measurements with flights as one clock would show them, none below zero.
        """
        self._now += seconds
        measured = {(edge.source, edge.destination): edge for edge in edges}
        for source, destination in measured:
            there, back = (source, destination), (destination, source)
            if source < destination and back in measured and there in levels and back in levels:
                later = self._flight(measured[there]) - levels[there]
                sooner = self._flight(measured[back]) - levels[back]
                gain, apart = (later - sooner) / 2, abs(later + sooner)
                elapsed = self._now - self._known_at.get(source, 0.0)
                is_possible = abs(gain) <= FASTEST * elapsed or apart <= OPPOSITE * abs(later - sooner)
                if is_possible and apart <= limit(there) + limit(back):
                    self._gained[source] = self.gained(source) + gain
                    self._known_at[source] = self._now
        return tuple(
            replace(edge, estimate=replace(edge.estimate, flight=max(self._flight(edge), 0.0))) for edge in measured.values()
        )

    def _flight(self, edge: EdgeMeasurement) -> float:
        """Return the flight as one clock would show it, seconds; below zero by noise."""
        gained = self.gained(min(edge.source, edge.destination))
        return edge.estimate.flight - (gained if edge.source < edge.destination else -gained)
