"""How many updates a loss takes, from the losses of the updates so far.

The rule is a straight line: the logarithm of the loss over that of the number of updates. So a loss falls as a power of that.
Losses are averaged over 20 spans of as many updates each, behind the first tenth, in which learning rates warm up. Steps next
to each other have much in common, but such spans have little.

Such a line has no floor, and true losses have one. So the number is too small rather than too large, the more so the further
away the loss is. Beyond 100 times the updates so far nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from adaptra.errors import CaseError
from adaptra.planning.synchrony.noise_scale import students_t

LEAST_LOSSES: Final = 20
"""With fewer losses a line says nothing."""
_SPANS: Final = 20
_SKIPPED: Final = 0.1
_FURTHEST: Final = 100
_CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class UpdatesToLoss:
    """The number of updates from the first one on until the loss is reached, with the ends of its interval; 95 %."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float | None]:
        """Return the numbers as JSON values; an interval without an upper end has none."""
        return {"updates": self.value, "low": self.low, "high": None if math.isinf(self.high) else self.high}


def updates_to(loss: float, losses: Mapping[int, float]) -> UpdatesToLoss:
    """Return how many updates a loss takes.

    Args:
        loss: The loss.
        losses: That of each update so far, by the update's number from 0 on; some may be missing.

    Raises:
        CaseError: It can't be said. The text says why.
    """
    if not loss > 0 or not all(one > 0 for one in losses.values()):
        raise CaseError("a loss of 0 or less: expected losses above 0, as a power of the updates has no others")
    last = max(losses, default=0) + 1
    kept = sorted((step + 1, one) for step, one in losses.items() if step >= _SKIPPED * last)
    if len(kept) < LEAST_LOSSES:
        raise CaseError(f"{len(kept)} losses behind the first tenth of the updates: expected at least {LEAST_LOSSES}")
    spans = [kept[len(kept) * span // _SPANS : len(kept) * (span + 1) // _SPANS] for span in range(_SPANS)]
    points = [(fmean(math.log(step) for step, _ in span), math.log(fmean(one for _, one in span))) for span in spans]
    middle, height = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - middle) ** 2 for x, _ in points)
    slope = sum((x - middle) * (y - height) for x, y in points) / spread
    rest = sum((y - height - slope * (x - middle)) ** 2 for x, y in points) / (_SPANS - 2)
    times = students_t(_CONFIDENCE, _SPANS - 2) ** 2 * rest
    # The line may pass through the loss where (height + slope·d - target)² ≤ times·(1/spans + d²/spread).
    down, steep = math.log(loss) - height, slope * slope - times / spread
    if slope >= 0 or steep <= 0:
        raise CaseError(f"the losses of {last} updates don't fall beyond chance: expected some that do")
    root = math.sqrt(max(0.0, (slope * down) ** 2 - steep * (down * down - times / _SPANS)))
    farthest = math.log(_FURTHEST * last)
    if middle + down / slope > farthest:
        raise CaseError(f"the line through the losses of {last} updates does not come to {loss:g} in {_FURTHEST} times as many")
    low, high = (middle + (slope * down + sign * root) / steep for sign in (-1, 1))
    return UpdatesToLoss(math.exp(middle + down / slope), math.exp(low), math.exp(high) if high < farthest else math.inf)
