"""Ports from measured links: which are narrow, and which links only vary."""

from __future__ import annotations

import random
from itertools import combinations, islice

import pytest

from adaptra.collectives.ports import LEAST_NARROWNESS, measured_ports
from adaptra.runtime.transports.link_probe import partners
from adaptra.simulation.links import Link

ALPHA, BETA = 1e-4, 5e-8


def pairs_measured(ranks: int, rounds: int = 3) -> list[tuple[int, int]]:
    """Return the pairs of replicas that a job measures."""
    found = [
        (rank, peer)
        for rank in range(ranks)
        for peer in islice(partners(rank, ranks), rounds)
        if peer is not None and rank < peer
    ]
    return sorted(found)


def links_of(ranks: int, narrow: dict[int, float], chance: random.Random, noise: float) -> dict[tuple[int, int], Link]:
    return {
        pair: Link(ALPHA, BETA * max(narrow.get(rank, 1.0) for rank in pair) * chance.uniform(1.0, 1.0 + noise))
        for pair in pairs_measured(ranks)
    }


@pytest.mark.parametrize("ranks", [3, 4, 5, 8, 17])
@pytest.mark.parametrize("factor", [1.8, 4.0])
def test_a_narrow_port_is_found_by_all_its_links(ranks: int, factor: float) -> None:
    chance = random.Random(ranks)
    for narrow in range(ranks):
        ports = measured_ports(links_of(ranks, {narrow: factor}, chance, 0.05), ranks)
        others = [one for rank, one in enumerate(ports.per_byte) if rank != narrow]
        assert len({*others}) == 1 and BETA <= others[0] <= 1.05 * BETA
        assert factor / 1.06 <= ports.per_byte[narrow] / others[0] <= 1.06 * factor


def test_several_narrow_ports_keep_rates_of_their_own() -> None:
    ports = measured_ports(
        {pair: Link(ALPHA, BETA * max({2: 2.0, 5: 4.0}.get(one, 1.0) for one in pair)) for pair in combinations(range(8), 2)}, 8
    )
    assert [one / BETA for one in ports.per_byte] == pytest.approx([1, 1, 2, 1, 1, 4, 1, 1])


def test_noise_slow_single_links_and_shared_hosts_make_no_port_narrow() -> None:
    chance = random.Random(0)
    for _ in range(200):
        links = links_of(8, {}, chance, LEAST_NARROWNESS - 1.01)
        assert len({*measured_ports(links, 8).per_byte}) == 1
    one_slow = {pair: Link(ALPHA, BETA * (9.0 if pair == (0, 2) else 1.0)) for pair in combinations(range(4), 2)}
    assert {*measured_ports(one_slow, 4).per_byte} == {9.0 * BETA}
    hosts = {pair: Link(ALPHA, BETA if pair in ((0, 1), (2, 3)) else 9.0 * BETA) for pair in combinations(range(4), 2)}
    assert {*measured_ports(hosts, 4).per_byte} == {9.0 * BETA}


def test_ranks_without_measured_links_and_links_without_a_rate_are_as_the_slowest() -> None:
    assert measured_ports({(0, 1): Link(ALPHA, BETA)}, 3).per_byte == (BETA,) * 3
    fast = {pair: Link(ALPHA, 0.0 if 2 not in pair else BETA) for pair in combinations(range(4), 2)}
    assert measured_ports(fast, 4).per_byte == (BETA,) * 4
