"""Flap damping: edges and stages that turn slow again soon after they recovered, and the cost of another relapse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from adaptra.runtime.detection.changes import Where
from adaptra.simulation.cost import CostModel

MOST_RELAPSES: Final = 5
"""Cap of the relapse counter."""


@dataclass(slots=True)
class Relapses:
    """Counts how often an edge or stage has turned slow again soon after a recovery.

    Attributes:
        within: A slowdown within this many steps after a recovery is a relapse. After that many healthy steps the count is
            cleared.
        count: The number of relapses.
    """

    within: int
    count: int = 0
    _since_healed: int | None = None

    @property
    def since_healed(self) -> int | None:
        """The number of healthy steps since the last recovery, or None if there can be no relapse."""
        return self._since_healed

    def step(self) -> None:
        """Advance by one step."""
        if self._since_healed is not None:
            self._since_healed += 1
            if self._since_healed > self.within:
                self.count, self._since_healed = 0, None

    def healed(self) -> None:
        """Record that the edge or stage is healthy, or less slow than before."""
        self._since_healed = 0

    def turned_slow(self) -> None:
        """Record that the edge or stage is slow, or slower than before."""
        if self._since_healed is not None:
            self.count, self._since_healed = min(self.count + 1, MOST_RELAPSES), None


class PendingRecovery(NamedTuple):
    """A recovery of flapping edges and stages that may not last.

    Attributes:
        since: The number of healthy steps since the latest of these recoveries.
        within: The number of healthy steps after which they do not count as flapping any more.
        cost: The cost model if all of them were as slow again as before.
        relapses: The largest number of relapses of these edges and stages.
    """

    since: int
    within: int
    cost: CostModel
    relapses: int = 1


@dataclass(slots=True)
class _History:
    relapses: Relapses
    slow: CostModel


class FlapDamping:
    """Tracks which edges and stages flap.

    Args:
        within: A slowdown within this many steps after a recovery counts as flapping.
    """

    def __init__(self, within: int) -> None:
        self._within = within
        self._places: dict[Where, _History] = {}

    def step(self) -> None:
        """Advance by one step."""
        for place in self._places.values():
            place.relapses.step()

    def changed(self, where: Where, is_slower: bool, before: CostModel) -> bool:
        """Record a change at an edge or stage, whose costs were ``before``.

        Returns:
            True if it is flapping.
        """
        place = self._places.setdefault(where, _History(Relapses(self._within), before))
        if is_slower:
            place.relapses.turned_slow()
        else:
            place.relapses.healed()
            place.slow = before
        return place.relapses.count > 0

    def forget(self, where: Where) -> None:
        """Discard the history of an edge or stage, because another detector follows it now."""
        self._places.pop(where, None)

    def doubt(self, cost: CostModel) -> PendingRecovery | None:
        """Return the pending recovery under the current costs; None if no flapping edge or stage has recovered."""
        doubted = {where: place for where, place in self._places.items() if place.relapses.count > 0}
        since = [place.relapses.since_healed for place in doubted.values()]
        healthy = [steps for steps in since if steps is not None]
        if not healthy:
            return None
        for where, place in doubted.items():
            if place.relapses.since_healed is not None:
                cost = _as_slow_as(cost, where, place.slow)
        count = max(place.relapses.count for place in doubted.values() if place.relapses.since_healed is not None)
        return PendingRecovery(min(healthy), self._within, cost, count)


def _as_slow_as(cost: CostModel, where: Where, slow: CostModel) -> CostModel:
    """Return a cost model with the costs of one edge or stage taken from another."""
    match where:
        case (stage,):
            return cost.with_stage(stage, slow.forward[stage], slow.input_grad[stage], slow.weight_grad[stage])
        case source, destination:
            latency, occupancy = slow.latency(source, destination), slow.occupancy(source, destination)
            return cost.with_latency(source, destination, latency).with_occupancy(source, destination, occupancy)
        case _:
            raise AssertionError(f"{where} is no place")
