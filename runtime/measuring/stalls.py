"""Stall detection: messages that a path delays, for example because they were lost and sent again.

A message stalls if it takes much longer than the one before it on its edge and no queue explains that. Messages sent during a
stall arrive behind it and are late as well.

A link that turns slow stalls only its first message. A lossy path, or one that alternates between two levels, stalls some
messages in step after step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

from adaptra.runtime.measuring.measurement import Stalls, arrival_spacings, usual_spacing

LEAST_STALL: Final = 0.1
"""Seconds: most systems' TCP retransmits after 200 ms or more, while pauses of a busy machine are mostly shorter."""


class StallTracker:
    """Tracks the messages of one directed edge from step to step."""

    def __init__(self) -> None:
        self._prompt: float | None = None
        self._is_late = False

    def observe(
        self, known: Sequence[tuple[float, float]], awaited: Sequence[tuple[float, float]] = ()
    ) -> tuple[Stalls, list[tuple[float, float]]]:
        """Find the stalls of a step, and the messages that show the path's speed.

        Args:
            known: ``(departed, arrived)`` per message in the order sent, of messages that only the path can have delayed.
            awaited: The same of messages that may have waited for the receiving rank.

        Returns:
            The stalls, and the ``known`` messages that were not late. If most were late, all of them; if there are none,
            ``awaited``.
        """
        spacing = usual_spacing(arrival_spacings([*known, *awaited])) or 0.0
        prompt: list[tuple[float, float]] = []
        before, behind, arrived_before = self._prompt, -math.inf, -math.inf
        count, late, lateness = 0, 0, 0.0
        for sent, arrived in known:
            waited = arrived - sent
            before = waited if before is None else before
            # A queued message waits for at most one occupancy, the time by which a message delays the next one.
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
        if known and late == len(known):  # not a stall but the path's new speed
            before, self._is_late = median(arrived - sent for sent, arrived in known), False
        self._prompt = before
        return Stalls(count, late, lateness), (prompt if late <= len(prompt) else list(known)) or list(awaited)
