"""Which reports are enough for an update in x-order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import pytest
from torch import distributed as dist

from adaptra.planning.synchrony.modes import XOrder
from adaptra.runtime.synchrony.reported_votes import Reported
from adaptra.runtime.synchrony.votes import Ballot, Vote, Votes

REPLICAS, STEPS = 5, 15


def members(order: XOrder, *votes: Vote) -> list[int]:
    return sorted(vote.site for vote in Reported(order).members(votes[0], votes[1:]))


def test_all_are_in_the_first_update() -> None:
    assert members(XOrder(1), Vote(0, 1), Vote(1, 0)) == []
    assert members(XOrder(1), Vote(0, 1), Vote(1, 1)) == [0, 1]


def test_an_update_has_x_replicas_or_all_that_are_left() -> None:
    assert members(XOrder(2), Vote(0, 5, updates=4), Vote(1, 4, updates=4), Vote(2, 4, updates=4)) == []
    assert members(XOrder(2), Vote(0, 5, updates=4), Vote(1, 5, updates=2), Vote(2, 4, updates=4)) == [0, 1]
    assert members(XOrder(2), Vote(0, 5, updates=4), Vote(1, 5, updates=4, is_last=True)) == [0]


def test_an_update_waits_for_whose_gradients_would_be_too_old_in_the_next_one() -> None:
    late = Vote(1, 3, updates=3)  # computes with the parameters of update 3: its age is 1 in update 5
    assert members(XOrder(1, staleness=2), Vote(0, 5, updates=4), late) == [0]
    assert members(XOrder(1, staleness=1), Vote(0, 5, updates=4), late) == []
    assert members(XOrder(1, staleness=0), Vote(0, 5, updates=4), Vote(1, 4, updates=4)) == []


def test_a_group_reports_as_a_whole() -> None:
    order = XOrder(groups=((0, 2), (1, 3)), staleness=3)
    here = [Vote(0, 5, updates=4), Vote(1, 5, updates=4), Vote(3, 5, updates=4)]
    assert members(order, *here, Vote(2, 4, updates=4)) == [1, 3]
    assert members(order, *here) == [0, 1, 3], "the other one of its group has left"
    assert members(order, *here[1:], Vote(0, 5, updates=1), Vote(2, 4, updates=4)) == [0, 1, 3], "it would be too old"
    assert members(order, Vote(0, 5, updates=4), Vote(2, 4, updates=4), Vote(1, 4, updates=4), Vote(3, 4, updates=4)) == []


def test_groups_are_of_alike_seconds() -> None:
    here = [Vote(0, 5, updates=4, seconds=1.0), Vote(2, 5, updates=4, seconds=1.1)]
    assert members(XOrder(groups="auto"), *here, Vote(1, 4, updates=4, seconds=2.0)) == [0, 2]
    assert members(XOrder(groups="auto"), here[0], Vote(2, 4, updates=4, seconds=1.1)) == []


def test_a_replica_in_the_midst_of_a_step_is_as_fast_as_in_its_last_one() -> None:
    """One that has begun its second step is waited for by the other, which is as fast, and is done with its own."""
    store, found, asked = dist.HashStore(), dict[int, list[Ballot | None]](), threading.Event()

    class Asked(Reported):
        def members(self, own: Vote, others: Sequence[Vote]) -> Sequence[Vote]:
            ready = super().members(own, others)
            if own.site == 0 and own.number == 2:
                asked.set()
            return ready

    def run(site: int) -> None:
        votes = Votes(store, site, 2, Asked(XOrder(groups="auto")), lambda: None)
        found[site] = [votes.vote(1.0, 0, seconds=1.0)]
        votes.have(1)
        both.wait(60)
        if site == 1:
            asked.wait(60)
        found[site].append(votes.vote(1.0, 1, seconds=1.05))
        votes.have(2)
        found[site].append(votes.vote(0.0, 2, is_last=True))
        votes.close()

    both = threading.Barrier(2)
    threads = [threading.Thread(target=run, args=(site,)) for site in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1]
    assert [one.sites for one in found[0] if one is not None] == [(0, 1)] * 3
    assert [vote.seconds for one in found[0] if one is not None for vote in one.votes] == [1.0, 1.0, 1.05, 1.05, 1.05, 1.05]


def test_who_waits_for_all_waits_until_all_do() -> None:
    waits = Vote(0, 5, is_last=True)
    assert members(XOrder(1), waits, Vote(1, 4)) == members(XOrder(1), waits, Vote(1, 4, is_last=True)) == []
    assert members(XOrder(1), waits, Vote(1, 5, is_last=True)) == [0, 1]


@pytest.mark.parametrize(
    "order",
    [XOrder(1, staleness=2), XOrder(3), XOrder(2, staleness=0), XOrder(groups=((0, 1, 2), (3, 4))), XOrder(groups="auto")],
    ids=repr,
)
def test_all_replicas_find_the_same_updates_each_step_in_one(order: XOrder) -> None:
    store, found = dist.HashStore(), [list[Ballot]() for _ in range(REPLICAS)]

    def run(site: int) -> None:
        drawn = random.Random(site)
        votes = Votes(store, site, REPLICAS, Reported(order), lambda: None)
        updates = 0
        for step in range(STEPS + 1):
            is_last = step == STEPS
            seconds = 0.0 if is_last else drawn.choice((0.0, 0.003, 0.02))
            time.sleep(seconds)
            ballot = None
            while ballot is None:
                ballot = votes.vote(1.0, updates, is_last=is_last, seconds=seconds)
            found[site].append(ballot)
            updates = ballot.number
            votes.have(updates)
        votes.close()

    threads = [threading.Thread(target=run, args=(site,)) for site in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    ballots = {one.number: one for of_site in found for one in of_site}
    assert sorted(ballots) == [*range(1, len(ballots) + 1)]
    steps = [0] * REPLICAS
    for number, ballot in sorted(ballots.items()):
        for vote in ballot.votes:
            assert found[vote.site][steps[vote.site]] == ballot, "each step is in the next update of its replica"
            steps[vote.site] += 1
            age = number - 1 - vote.updates
            assert age == number - 1 - (found[vote.site][steps[vote.site] - 2].number if steps[vote.site] > 1 else 0)
            assert vote.is_last or order.staleness is None or age <= order.staleness
    assert steps == [STEPS + 1] * REPLICAS
