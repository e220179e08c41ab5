"""Rounds played over ports of given rates, and the level that no sum goes below."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from adaptra.collectives.ports import Ports, flights, seconds_of, water_level
from adaptra.collectives.rounds import ALGORITHMS
from adaptra.equations.sums import sum_equations

MODEL = sum_equations()


def played(algorithm: str, parts: int, nbytes: float, ports: Ports) -> float:
    return seconds_of(ALGORITHMS[algorithm](ports.ranks, parts, None), nbytes / parts, ports)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("delay", [0.0, 0.4, 9.0])
def test_equal_ports_take_what_the_equations_say(ranks: int, delay: float) -> None:
    late = Ports(0.01, (0.5,) * ranks, (0.0,) * (ranks - 1) + (delay,))
    assert played("direct", ranks, 2.0, late) == pytest.approx(MODEL.direct.evaluate(delay, ranks, 2.0, 0.01, 0.5))
    early = Ports(0.01, (0.5,) * ranks)
    folded = MODEL.chain.evaluate(0, ranks, 5, 2.0, 0.01, 0.5) if ranks > 2 else 6 * 0.21
    assert played("chain", 5, 2.0, early) == pytest.approx(folded)


def test_no_port_carries_two_messages_at_once_and_no_message_leaves_before_its_value_is_there() -> None:
    ports = Ports(0.1, (1.0, 2.0, 1.0, 0.5), (0.0, 3.0, 0.0, 0.7))
    for name, algorithm in ALGORITHMS.items():
        flown = [*flights(algorithm(4, 8, None), 0.25, ports)]
        for end in ("source", "destination"):
            for rank in range(4):
                busy = [flight for flight in flown if getattr(flight.message, end) == rank]
                assert all(after.start >= before.end for before, after in pairwise(busy)), name
                assert all(flight.start >= ports.arrivals[rank] for flight in busy), name
        for flight in flown:
            wide = max(ports.per_byte[flight.message.source], ports.per_byte[flight.message.destination])
            assert flight.end - flight.start == pytest.approx(0.1 + 0.25 * wide)
            needed = [
                other.end
                for other in flown
                if other.message.destination == flight.message.source
                and other.message.value.part == flight.message.value.part
                and other.message.round < flight.message.round
            ]
            is_own = flight.message.value[1:] == (flight.message.source, flight.message.source + 1)
            assert is_own or flight.start >= max(needed, default=0.0)


@pytest.mark.parametrize(
    ("arrivals", "per_byte", "expected"),
    [
        ((0,) * 4, (1,) * 4, 1.5),  # 2(N-1)/N: direct is as short as can be
        ((0, 0, 0, 0.8), (1,) * 4, 1.8),  # the last rank alone
        ((0, 0, 0, 0.4), (1,) * 4, 1.6),  # 2(N-1)/N + D/N
        ((0,) * 8, (1,) * 7 + (2,), 2.0),  # one port at half rate
        ((0, 0.5), (1, 1), 1.5),
    ],
)
def test_the_water_level_has_the_known_cases(arrivals: Sequence[float], per_byte: Sequence[float], expected: float) -> None:
    level = water_level(1.0, Ports(0.0, tuple(map(float, per_byte)), tuple(map(float, arrivals))))
    assert level.seconds == pytest.approx(expected)
    assert sum(level.shares) == pytest.approx(1.0)


def test_no_sum_ends_before_the_water_level() -> None:
    chance = random.Random(3)
    for _ in range(60):
        ranks = chance.randint(2, 9)
        ports = Ports(
            chance.choice([0.0, 0.02, 0.3]),
            tuple(chance.choice([1.0, 1.0, 2.5]) for _ in range(ranks)),
            tuple(chance.choice([0.0, 0.0, chance.uniform(0, 3)]) for _ in range(ranks)),
        )
        level = water_level(1.0, ports)
        assert sum(level.shares) == pytest.approx(1.0)
        for name, parts in (("direct", ranks), ("direct", 2 * ranks), ("chain", 6)):
            assert played(name, parts, 1.0, ports) >= level.seconds * (1 - 1e-9), (name, ports)
