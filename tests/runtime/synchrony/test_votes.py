"""The vote on who takes part in an exchange: all voters find the same, however late each of them is."""

from __future__ import annotations

import random
import threading
import time

import pytest
from torch import distributed as dist

from adaptra.errors import ControlError, PeerLostError
from adaptra.planning.synchrony.modes import Local
from adaptra.runtime.synchrony.votes import Ballot, Quorum, Votes

SITES, QUORUM, STEPS = 5, 3, 12


def no_error() -> None:
    pass


def sites_that_train(store: dist.Store, seed: int) -> list[list[Ballot]]:
    """The exchanges of each site, which makes so many steps of random times and then waits for all."""
    found: list[list[Ballot]] = [[] for _ in range(SITES)]

    def run(site: int) -> None:
        drawn = random.Random(f"{seed}/{site}")
        local = Local(2, quorum=QUORUM, grace=drawn.choice((0.0, 0.01)))
        votes = Votes(store, site, SITES, Quorum(local, SITES), no_error)
        since = updates = weight = 0
        for _ in range(STEPS):
            time.sleep(drawn.choice((0.0, 0.002, 0.03)))
            if weight and (since >= 2 or votes.is_open()):
                decision, since = votes.vote(float(weight), updates), 0
                if decision is not None:
                    found[site].append(decision)
                    weight, updates = 0, decision.number
            since, weight = since + 1, weight + 1
        while True:
            decision = votes.vote(float(weight), updates, is_last=True)
            if decision is not None:
                found[site].append(decision)
                weight, updates = 0, decision.number
                if all(vote.is_last for vote in decision.votes):
                    break
        votes.close()

    threads = [threading.Thread(target=run, args=(site,)) for site in range(SITES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_all_sites_find_the_same_exchanges_and_no_step_is_lost(seed: int) -> None:
    found = sites_that_train(dist.HashStore(), seed)
    decided = {one.number: one for of_site in found for one in of_site}
    for number, decision in decided.items():
        for site in range(SITES):
            assert ([one for one in found[site] if one.number == number] == [decision]) == (site in decision.sites)
        assert len(decision.sites) >= QUORUM
    assert sorted(decided) == [*range(1, len(decided) + 1)]
    for before, after in zip(sorted(decided)[:-1], sorted(decided)[1:], strict=True):
        assert {*decided[before].sites} & {*decided[after].sites}, "somebody has the updates before"
    last = decided[max(decided)]
    assert last.sites == tuple(range(SITES)) and all(vote.is_last for vote in last.votes)
    for site in range(SITES):
        assert sum(vote.weight for one in found[site] for vote in one.votes if vote.site == site) == STEPS


def test_a_site_goes_on_alone_where_too_few_are_left() -> None:
    store = dist.HashStore()
    local = Local(1, quorum=2, grace=0.0)
    one, other = (Votes(store, site, 2, Quorum(local, 2), no_error) for site in range(2))
    other.close()
    assert not one.is_open()
    assert one.vote(1.0, 0) is None
    decision = one.vote(1.0, 0, is_last=True)
    assert decision is not None and decision.sites == (0,)


def test_a_lost_rank_ends_the_wait_for_a_quorum() -> None:
    lost = PeerLostError("rank 1 is lost", rank=1)

    def check() -> None:
        raise lost

    store = dist.HashStore()
    one, _ = (Votes(store, site, 2, Quorum(Local(1, quorum=2), 2), check) for site in range(2))
    with pytest.raises(PeerLostError) as caught:
        one.vote(1.0, 0)
    assert caught.value is lost


def test_a_record_that_no_site_has_written_is_refused() -> None:
    store = dist.HashStore()
    one, _ = (Votes(store, site, 2, Quorum(Local(1, quorum=2), 2), no_error) for site in range(2))
    store.set("ballot/1", '{"number": 0, "votes": []}')
    with pytest.raises(ControlError, match="exchange between sites"):
        one.vote(1.0, 0)
