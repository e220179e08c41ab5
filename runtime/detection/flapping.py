"""What flaps: places that turn slow again soon after they had healed, and what it would cost if they did so once more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from adaptra.runtime.detection.changes import Where
from adaptra.simulation.cost import CostModel

MOST_RELAPSES: Final = 5
"""Of more relapses than these the count is not kept."""


@dataclass(slots=True)
class Relapses:
    """Counts how often a place has turned slow again soon after it had healed.

    Attributes:
        within: What turns slow again within so many steps is a relapse; one that has not is forgotten with all before it.
        count: So often.
    """

    within: int
    count: int = 0
    _since_healed: int | None = None

    @property
    def since_healed(self) -> int | None:
        """For how many steps the place has been healthy, if it may relapse."""
        return self._since_healed

    def step(self) -> None:
        """A step has passed."""
        if self._since_healed is not None:
            self._since_healed += 1
            if self._since_healed > self.within:
                self.count, self._since_healed = 0, None

    def healed(self) -> None:
        """The place is healthy, or less slow."""
        self._since_healed = 0

    def turned_slow(self) -> None:
        """The place is slow, or slower than it was."""
        if self._since_healed is not None:
            self.count, self._since_healed = min(self.count + 1, MOST_RELAPSES), None


class PendingRecovery(NamedTuple):
    """What may come again of what has healed.

    Attributes:
        since: For how many steps the last of the places that flap has been healthy.
        within: Once all of them have been for so many, they don't flap any more.
        cost: What would hold if all of them were as slow again as they were.
    """

    since: int
    within: int
    cost: CostModel


@dataclass(slots=True)
class _History:
    relapses: Relapses
    slow: CostModel


class FlapDamping:
    """Follows which places flap.

    Args:
        within: What turns slow again within so many steps after it healed does.
    """

    def __init__(self, within: int) -> None:
        self._within = within
        self._places: dict[Where, _History] = {}

    def step(self) -> None:
        """A step has passed."""
        for place in self._places.values():
            place.relapses.step()

    def changed(self, where: Where, is_slower: bool, before: CostModel) -> bool:
        """A place has turned slower or less slow than ``before``; whether it flaps."""
        place = self._places.setdefault(where, _History(Relapses(self._within), before))
        if is_slower:
            place.relapses.turned_slow()
        else:
            place.relapses.healed()
            place.slow = before
        return place.relapses.count > 0

    def forget(self, where: Where) -> None:
        """Something else is known of a place now."""
        self._places.pop(where, None)

    def doubt(self, cost: CostModel) -> PendingRecovery | None:
        """What may come again, given what holds now; None where nothing that flaps has healed."""
        doubted = {where: place for where, place in self._places.items() if place.relapses.count > 0}
        since = [place.relapses.since_healed for place in doubted.values()]
        healthy = [steps for steps in since if steps is not None]
        if not healthy:
            return None
        for where, place in doubted.items():
            if place.relapses.since_healed is not None:
                cost = _as_slow_as(cost, where, place.slow)
        return PendingRecovery(min(healthy), self._within, cost)


def _as_slow_as(cost: CostModel, where: Where, slow: CostModel) -> CostModel:
    """A cost model, but for one place, for which another holds."""
    match where:
        case (stage,):
            return cost.with_stage(stage, slow.forward[stage], slow.input_grad[stage], slow.weight_grad[stage])
        case source, destination:
            latency, occupancy = slow.latency(source, destination), slow.occupancy(source, destination)
            return cost.with_latency(source, destination, latency).with_occupancy(source, destination, occupancy)
        case _:
            raise AssertionError(f"{where} is no place")
