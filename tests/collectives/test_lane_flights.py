"""Rounds played with a lane from each rank to each: what they keep of the order, and what a narrow port costs then."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest

from adaptra.collectives.algorithms import AlgorithmWithout, algorithm_of, sum_messages
from adaptra.collectives.choice import SumCase, SumWay
from adaptra.collectives.ports import MOST_OPEN, Flight, Ports, flights, lane_flights
from adaptra.equations.sums import sum_equations

HALF = Ports(1e-4, (4e-8, 8e-8, *(4e-8,) * 6))
"""Eight ports of 25 MB/s, of which one has half the rate."""
NBYTES = 8e6
LEAST = NBYTES * 4e-8


def end_of(played: list[Flight]) -> float:
    return max(flight.end for flight in played)


@pytest.mark.parametrize("name", ["direct", "chain", "streamed", "merge", "swap"])
def test_lanes_keep_what_rounds_promise(name: str) -> None:
    chance = random.Random(name)
    for _ in range(5):
        ports = Ports(
            chance.choice([0.0, 0.1]),
            tuple(chance.choice([1.0, 2.0, 3.0]) for _ in range(5)),
            tuple(chance.choice([0.0, chance.uniform(0, 9)]) for _ in range(5)),
        )
        messages = [*sum_messages(name, 5, 20, (4,) if name in ("streamed", "merge", "swap") else ())]
        played = [*lane_flights(messages, 0.5, ports)]
        assert sorted(flight.message.round for flight in played) == [message.round for message in messages]
        lanes: defaultdict[tuple[int, int], list[Flight]] = defaultdict(list)
        for flight in played:
            source, destination, value = flight.message.source, flight.message.destination, flight.message.value
            lanes[source, destination].append(flight)
            assert flight.start >= max(ports.arrivals[source], ports.arrivals[destination])
            took = ports.latency + 0.5 * max(ports.per_byte[source], ports.per_byte[destination])
            assert flight.end >= flight.start + took - 1e-9
            if value[1:] == (source, source + 1):
                continue
            needed = [
                other.end
                for other in played
                if (other.message.destination, other.message.value.part) == (source, value.part)
                and other.message.round < flight.message.round
            ]
            assert flight.start >= max(needed)
        for lane in lanes.values():
            assert all(one.message.round < other.message.round for one, other in pairwise(lane))
            assert all(later.start >= one.end for one, later in zip(lane, lane[MOST_OPEN:], strict=False))
        for rank, per_byte in enumerate(ports.per_byte):
            for end in ("source", "destination"):
                of_rank = [flight for flight in played if getattr(flight.message, end) == rank]
                busy = len(of_rank) * (ports.latency + 0.5 * per_byte)
                assert max(flight.end for flight in of_rank) >= ports.arrivals[rank] + busy - 1e-9


def test_direct_and_chain_take_as_long_either_way() -> None:
    for name, parts in (("direct", 8), ("direct", 64), ("chain", 100)):
        messages = [*sum_messages(name, 8, parts)]
        in_order, by_lane = (end_of([*play(messages, NBYTES / parts, HALF)]) for play in (flights, lane_flights))
        assert by_lane == pytest.approx(in_order, rel=0.01)


def test_a_narrow_port_holds_up_nobody_who_has_a_lane_to_each_other() -> None:
    """The bars of real hosts: 3.5 for direct and for a ring, 2.5 for one of eight ports at half rate, bound 2."""
    messages = [*sum_messages("streamed", 8, 128, (1,))]
    assert end_of([*flights(messages, NBYTES / 128, HALF)]) > 3 * LEAST, "in one lane each waits for the narrow port"
    assert 2 * LEAST < end_of([*lane_flights(messages, NBYTES / 128, HALF)]) < 2.2 * LEAST


def test_the_choice_has_lanes_where_ranks_are_narrow_and_not_late() -> None:
    case = SumCase(NBYTES, HALF)
    chosen = case.prices[0]
    assert (chosen.way.algorithm, chosen.way.late, chosen.way.narrow) == ("streamed", (1,), (1,))
    assert chosen.seconds == pytest.approx(chosen.expected, rel=0.01) and chosen.seconds < 2.2 * LEAST
    assert chosen.seconds == end_of([*case.flights(chosen.way)])
    assert pytest.approx(case.price(case.way("direct")).seconds, rel=0.01) == 3.5 * LEAST
    assert str(chosen.way).endswith(" parts, 1 own nothing, 1 for a narrow port")
    late = SumCase(NBYTES, Ports(HALF.latency, HALF.per_byte, (0.0, 1.0, *(0.0,) * 6)))
    assert (late.way("streamed", (1,)).narrow, late.way("streamed", (1,)).has_lanes) == ((), False)
    other = SumCase(NBYTES, Ports(HALF.latency, HALF.per_byte, (0.0,) * 7 + (1.0,)))
    assert (other.way("streamed", (1, 7)).narrow, other.way("streamed", (1, 7)).has_lanes) == ((1,), False)
    alike = SumCase(NBYTES, Ports(HALF.latency, (4e-8,) * 8))
    assert alike.way("streamed", (1,)).narrow == (), "a port like all others is not narrow"


def test_messages_keep_their_rounds_behind_late_ranks_alone() -> None:
    late, narrow, both = (algorithm_of("streamed", (1, 2), narrow) for narrow in ((), (1, 2), (2,)))
    kept: list[set[tuple[bool, int]]] = []
    for algorithm in (late, narrow, both):
        assert isinstance(algorithm, AlgorithmWithout)
        in_line = [one for one in algorithm(5, 6, None) if algorithm.keeps_round(one)]
        kept.append({(one.source in (1, 2), one.value.end - one.value.first) for one in in_line})
    assert kept == [{(True, 1), (False, 5)}, set(), {(True, 1), (False, 5)}], "owners' own terms don't"


def test_narrow_ports_take_what_is_played_over_lanes() -> None:
    for ranks, narrow, each, rate in ((8, 1, 16, 2.0), (8, 1, 40, 3.0), (8, 2, 21, 2.0), (5, 1, 12, 1.1)):
        per_byte = tuple(rate if rank < narrow else 1.0 for rank in range(ranks))
        ports, late = Ports(1e-3, per_byte), tuple(range(narrow))
        price = SumCase(4.0, ports).price(SumWay("streamed", late, each * (ranks - narrow), late))
        assert price.expected == sum_equations().narrow.evaluate(ranks, narrow, each, 4.0, 1e-3, 1.0, rate)
        assert price.seconds == pytest.approx(price.expected, rel=0.04)
