"""The rule of x-order: an update happens once enough replicas have reported, or all of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from adaptra.planning.synchrony.clock import groups_by_speed
from adaptra.planning.synchrony.modes import Groups, XOrder
from adaptra.runtime.synchrony.votes import Vote


class Reported:
    """Says which reports are enough for an update. A vote's number is that of the update. Its ``updates``
    are those in the parameters of which the replica computes gradients, or has computed them.

    All replicas are in the first update. Later ones wait for replicas whose gradients would be too old in the next one.

    Args:
        order: How many replicas an update has, and how old gradients may be.
    """

    def __init__(self, order: XOrder) -> None:
        self._order: Final = order

    def can_decide(self, own: Vote, others: Sequence[Vote]) -> bool:
        """As of :class:`.votes.Rule`. With fewer replicas than x, all that are left make updates."""
        del own, others
        return True

    def members(self, own: Vote, others: Sequence[Vote]) -> Sequence[Vote]:
        """As of :class:`.votes.Rule`. Who waits for all others in ``pipe.exchange()`` has nothing to report."""
        everyone = [own, *others]
        if own.is_last:
            return everyone if all(vote.is_last and vote.number == own.number for vote in others) else ()
        left = [vote for vote in everyone if not vote.is_last]
        reported = [vote for vote in left if vote.number == own.number]
        absent = [vote for vote in left if vote.number != own.number]
        if absent and own.number == 1:
            return ()
        if any(self._is_last_call(own.number, vote) for vote in absent):
            return ()
        return self._enough(own.number, left, reported)

    def _is_last_call(self, number: int, vote: Vote) -> bool:
        """Return whether the gradients of a replica would be too old in the update after this one."""
        return self._order.staleness is not None and number - vote.updates > self._order.staleness

    def _enough(self, number: int, left: Sequence[Vote], reported: Sequence[Vote]) -> Sequence[Vote]:
        if self._order.x is not None:
            return reported if len(reported) >= min(self._order.x, len(left)) else ()
        here = {vote.site for vote in reported}
        ready = [group for group in self._groups(left) if here.issuperset(group)]
        in_any = {site for group in ready for site in group}
        return [vote for vote in reported if ready and (vote.site in in_any or self._is_last_call(number, vote))]

    def _groups(self, left: Sequence[Vote]) -> Groups:
        """Return the groups of the replicas that are left, each with one at least."""
        if self._order.groups == "auto":
            groups = groups_by_speed([vote.seconds for vote in left])
            return tuple(tuple(left[index].site for index in group) for group in groups)
        sites = {vote.site for vote in left}
        return tuple(kept for group in self._order.groups or () if (kept := tuple(site for site in group if site in sites)))
