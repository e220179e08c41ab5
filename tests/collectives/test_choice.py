"""The choice of an algorithm for a sum: known delays and sizes, late sets, and the shortest of all that are played."""

from __future__ import annotations

import random

import pytest

from adaptra.collectives.choice import SumCase, SumWay
from adaptra.collectives.ports import Ports


def one_late(ranks: int, delay: float, nbytes: float = 2.0**30) -> SumCase:
    """A sum of 1 GiB at 3 µs and 450 GiB/s, the last rank late."""
    return SumCase(nbytes, Ports(3e-6, (1 / (450 * 2**30),) * ranks, (0.0,) * (ranks - 1) + (delay,)))


def critical(case: SumCase) -> float:
    applied = case.critical_delay
    assert applied is not None
    return applied.result


@pytest.mark.parametrize(("ranks", "milliseconds"), [(4, 0.67), (8, 0.61), (16, 0.55)])
def test_a_late_rank_owns_nothing_from_the_critical_delay_on(ranks: int, milliseconds: float) -> None:
    delay = critical(one_late(ranks, 0.0))
    assert 1e3 * delay == pytest.approx(milliseconds, abs=0.01)
    below, above = (one_late(ranks, factor * delay) for factor in (0.7, 2.0))
    assert above.prices[0].way.late == (ranks - 1,)
    for case in (below, above):
        chosen, direct = case.prices[0], case.price(case.way("direct"))
        last = max(case.ports.arrivals)
        assert chosen.seconds - last <= 1.01 * (direct.seconds - last)
    merge = below.expected(below.way("merge", (ranks - 1,)))
    assert merge > below.expected(below.way("direct"))


def test_two_ranks_never_leave_direct() -> None:
    case = one_late(2, 1.0)
    assert case.critical_delay is None and case.streamed_from is None
    assert [price.way for price in case.prices] == [SumWay("direct", (), 2)]


def test_several_late_ranks_take_streamed() -> None:
    case = one_late(8, 0.01)
    assert case.streamed_from == 2
    ports = Ports(3e-6, case.ports.per_byte, (0.0, 0.0, 0.01, 0.0, 0.0, 0.01, 0.0, 0.0))
    chosen = SumCase(case.nbytes, ports).prices[0]
    assert (chosen.way.algorithm, chosen.way.late) == ("streamed", (2, 5))
    assert chosen.way.parts % 6 == 0
    assert 0.99 * chosen.expected <= chosen.seconds <= chosen.expected, "rounds in lockstep take what the equation says"


def test_late_sets_hold_what_is_late_or_narrow_and_never_all_owners() -> None:
    ports = Ports(1e-6, (1.0, 2.0, 1.0, 1.0, 1.0), (0.0, 0.0, 3.0, 0.5, 0.5))
    assert [*SumCase(1.0, ports).late_sets()] == [(2,), (1, 2)]
    assert [*SumCase(1.0, Ports(1e-6, (1.0,) * 4)).late_sets()] == [(3,)]
    assert [*SumCase(1.0, Ports(1e-6, (1.0,) * 2)).late_sets()] == []


@pytest.mark.parametrize("seed", [11, 14])
def test_the_choice_is_the_shortest_of_all_that_are_played(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(12):
        ranks = chance.randint(3, 6)
        per_byte = tuple(chance.choice([1.0, 1.0, 2.0]) for _ in range(ranks))
        arrivals = tuple(chance.choice([0.0, 0.0, chance.uniform(0, 4)]) for _ in range(ranks))
        case = SumCase(1.0, Ports(chance.choice([0.002, 0.05]), per_byte, arrivals))
        last = max(arrivals)
        ways = [case.way("direct"), case.way("chain")]
        for late in case.late_sets():
            ways += [case.way(name, late) for name in ("streamed", "merge")[: 3 - len(late)]]
        ladder = {way.with_parts(way.parts * factor, ranks) for way in ways[1:] for factor in (0.35, 0.6, 0.9, 1.3, 2.5)}
        played = [case.price(way).seconds - last for way in (*ways, *ladder)]
        assert case.prices[0].seconds - last <= 1.02 * min(played), case
        assert case.bound.seconds <= case.prices[0].seconds * (1 + 1e-9)


@pytest.mark.parametrize("latency", [1e-30, 1e-12])
def test_parts_are_no_more_than_can_be_played(latency: float) -> None:
    """Without a latency the equations take as many parts as there are bytes, and more."""
    case = SumCase(1e12, Ports(latency, (1e-9,) * 4, (0.0, 0.0, 0.0, 1.0)))
    assert max(price.way.parts for price in case.prices) in range(1000, 1030)
    assert case.critical_delay is not None
    assert {price.way.parts for price in one_late(8, 0.01).prices} <= set(range(1, 200)), "others choose as before"
