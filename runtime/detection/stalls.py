"""Messages that a path holds up, as it does those that are lost and sent again, beside others that are as fast as ever.

A message stalls if it takes much longer than the one before it on its edge, and no queue explains that. What is sent while it
is held up arrives behind it and is late as well. A link that turns slow stalls one message, its first; a lossy path, or one
that alternates between two levels, stalls some in step after step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

from adaptra.runtime.detection.measurement import Stalls, arrival_spacings, usual_spacing

LEAST_STALL: Final = 0.1
"""Seconds: what TCP has lost it sends again after 200 ms or more on most systems; busy machines mostly pause for less."""


class StallTracker:
    """Follows the messages of one directed edge from step to step."""

    def __init__(self) -> None:
        self._prompt: float | None = None
        self._is_late = False

    def observe(
        self, known: Sequence[tuple[float, float]], awaited: Sequence[tuple[float, float]] = ()
    ) -> tuple[Stalls, list[tuple[float, float]]]:
        """What a step's messages show, and those that say how fast the path is: the known ones that were not late.

        If most of them were late all are returned, and if none is known those that waited.

        Args:
            known: ``(departed, arrived)`` per message in the order sent, of those that nothing but the path can have held up.
            awaited: Of those that may have waited for the receiving rank.
        """
        spacing = usual_spacing(arrival_spacings([*known, *awaited])) or 0.0
        prompt: list[tuple[float, float]] = []
        before, behind, arrived_before = self._prompt, -math.inf, -math.inf
        count, late, lateness = 0, 0, 0.0
        for sent, arrived in known:
            waited = arrived - sent
            before = waited if before is None else before
            # Whoever queues waits no longer than one message keeps the next from departing.
            least = max(LEAST_STALL, spacing) if sent < arrived_before else LEAST_STALL
            if not self._is_late and waited - before > least:
                count, behind, self._is_late = count + 1, arrived, True
            elif self._is_late and sent >= behind and waited - before <= LEAST_STALL / 2:
                self._is_late = False
            if self._is_late:
                late, lateness = late + 1, lateness + max(waited - before, 0.0)
            else:
                prompt.append((sent, arrived))
                before = waited
            arrived_before = arrived
        if known and late == len(known):  # no stall any more, but how long messages now take
            before, self._is_late = median(arrived - sent for sent, arrived in known), False
        self._prompt = before
        return Stalls(count, late, lateness), (prompt if late <= len(prompt) else list(known)) or list(awaited)
