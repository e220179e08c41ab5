"""Which ranks are late, and which algorithm the next sum takes, from arrivals alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from adaptra.collectives.algorithms import LATE
from adaptra.collectives.buckets import LEAST_BYTES
from adaptra.collectives.late_ranks import LEAST_REMEMBERED, PAYING_STEPS, REMEMBERED, STEPS_IN_A_ROW, LateRanks
from adaptra.collectives.ports import Ports, measured_ports
from adaptra.simulation.links import Link

NBYTES = 64 << 20
LINK = Link(1e-4, 1e-8)
"""A sum's bytes take 0.67 s through a port."""
WELL, LATER, BACK = LEAST_REMEMBERED + 4, 3, 5
"""Steps before a rank is late, and the most until it has another algorithm, and until direct is back."""


def alike(ranks: int, link: Link) -> Ports:
    return measured_ports({(0, 1): link}, ranks)


def decided(ranks: int, memory: int = NBYTES, bucket: int | None = None) -> LateRanks:
    return LateRanks(NBYTES, alike(ranks, LINK), memory, bucket)


def arrivals(ranks: int, late: Sequence[int], delay: float, chance: random.Random, jitter: float = 0.002) -> list[float]:
    return [1.0 + (delay if rank in late else 0.0) + chance.uniform(0.0, jitter) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "late"), [(3, (0,)), (3, (2,)), (4, (1,)), (5, (4,)), (8, (1,)), (8, (1, 2)), (17, (16,)), (17, (0, 5))]
)
def test_late_ranks_own_nothing_within_three_steps_and_own_again_within_five(ranks: int, late: tuple[int, ...]) -> None:
    decision, chance = decided(ranks), random.Random(ranks)
    for _ in range(WELL):
        decision.observe(arrivals(ranks, (), 0.0, chance))
        assert decision.choice.way.algorithm == "direct"
    for _ in range(LATER):
        decision.observe(arrivals(ranks, late, 0.7, chance))
    chosen = decision.choice
    assert chosen.way.algorithm in LATE and chosen.way.late == late
    prices = dict(chosen.seconds)
    gain = prices["direct"] - prices[chosen.way.algorithm]
    assert 0 < chosen.wrong_guess <= PAYING_STEPS * gain
    for _ in range(40):
        decision.observe(arrivals(ranks, late, 0.7, chance))
        assert decision.choice.way == chosen.way, "a way in place stays"
    for _ in range(BACK):
        decision.observe(arrivals(ranks, (), 0.0, chance))
    assert decision.choice.way.algorithm == "direct"
    assert decision.choice.wrong_guess == 0.0


def test_another_late_rank_takes_the_place_of_the_first() -> None:
    decision, chance = decided(6), random.Random(1)
    for _ in range(WELL):
        decision.observe(arrivals(6, (), 0.0, chance))
    for late in ((2,), (4,), (2, 4), (2,)):
        for _ in range(BACK):
            decision.observe(arrivals(6, late, 0.7, chance))
        assert decision.choice.way.late == late


def _normal(chance: random.Random, _rank: int) -> float:
    return chance.gauss(1.0, 0.05)


def _skewed(chance: random.Random, _rank: int) -> float:
    pause = 0.2 * chance.paretovariate(1.5) if chance.random() < 0.02 else 0.0
    return chance.lognormvariate(0.0, 0.1) + pause


def _one_erratic(chance: random.Random, rank: int) -> float:
    return 1.0 + abs(chance.gauss(0.0, 0.3 if rank == 1 else 0.01))


def _waits(chance: random.Random, rank: int) -> float:
    return 1.0 + 0.002 * rank + chance.expovariate(20.0)


@pytest.mark.parametrize("noise", [_normal, _skewed, _one_erratic, _waits])
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_noise_changes_nothing_in_two_hours(ranks: int, noise: Callable[[random.Random, int], float]) -> None:
    """Steps of a second, over links on which a late rank would matter."""
    decision, chance = LateRanks(16 << 20, alike(ranks, Link(1e-4, 1e-9)), NBYTES), random.Random(f"{noise.__name__} {ranks}")
    for step in range(7200):
        decision.observe([noise(chance, rank) for rank in range(ranks)])
        assert decision.choice.way.algorithm == "direct", step


def test_a_late_rank_is_found_in_noise() -> None:
    decision, chance = decided(4), random.Random(0)
    for step in range(300):
        decision.observe([_skewed(chance, rank) + (6.0 if rank == 2 and step >= 100 else 0.0) for rank in range(4)])
        if step >= 102:
            assert decision.choice.way.late == (2,)


def test_a_delay_that_does_not_pay_leaves_direct_and_says_what_others_take() -> None:
    decision, chance = decided(4), random.Random(0)
    for _ in range(WELL):
        decision.observe(arrivals(4, (2,), 0.1, chance))
    assert decision.choice.way.algorithm == "direct"
    assert min(dict(decision.choice.seconds), key=dict(decision.choice.seconds).__getitem__) == "direct"
    assert "direct 1" in str(decision.choice)


def test_memory_bounds_what_waits_for_a_late_rank() -> None:
    needed = NBYTES * 2 // 3
    for memory, algorithm in ((needed - 1, "direct"), (needed, "streamed")):
        decision, chance = decided(4, memory), random.Random(0)
        for step in range(WELL + LATER):
            decision.observe(arrivals(4, (1,) if step >= WELL else (), 0.7, chance))
        assert decision.choice.way.algorithm == algorithm
        assert decision.held_bytes(decision.choice.way) <= memory or algorithm == "direct"


@pytest.mark.parametrize("bucket", [None, 1 << 20])
def test_buckets_give_the_parts_that_were_priced(bucket: int | None) -> None:
    decision, chance = decided(4, bucket=bucket), random.Random(0)
    for step in range(WELL + LATER):
        decision.observe(arrivals(4, (1,) if step >= WELL else (), 0.7, chance))
    way = decision.choice.way
    assert way.late == (1,)
    assert 4 * -(-NBYTES // decision.bucket_of(way)) == way.parts
    assert bucket is None or decision.bucket_of(way) == bucket


def test_digests_tell_ranks_that_decide_from_something_else() -> None:
    chance = random.Random(0)
    one, other, with_less = decided(4), decided(4), decided(4, NBYTES // 2)
    assert one.digest == other.digest != with_less.digest
    for _ in range(20):
        seen = arrivals(4, (1,), 0.7, chance)
        one.observe(seen)
        other.observe(seen)
        assert (one.digest, one.choice) == (other.digest, other.choice)
    one.observe([1.0, 1.0, 1.0, 1.0])
    other.observe([1.0, 1.0, 1.0, 1.0000001])
    assert one.digest != other.digest


def test_it_says_what_it_depends_on() -> None:
    decision, chance = decided(4), random.Random(0)
    assert str(decision) == "by direct in 4 parts; links of 0.100 ms and 100 MB/s"
    for step in range(WELL + LATER):
        decision.observe(arrivals(4, (1,) if step >= WELL else (), 0.7, chance))
    text = str(decision)
    assert text.startswith("replica 1 last, 70") and "streamed in " in text and ", direct 1" in text
    assert "ms more than direct; up to 42.7 MiB wait for a late replica" in text


NARROW = Ports(LINK.latency, (LINK.per_byte, 2 * LINK.per_byte, *(LINK.per_byte,) * 6))
"""Eight ports, of which one has half the rate."""


def test_a_narrow_port_owns_nothing_from_the_first_sum_on() -> None:
    decision, chance = LateRanks(NBYTES, NARROW, NBYTES), random.Random(2)
    usual = decision.choice
    assert (usual.way.algorithm, usual.way.late, usual.way.narrow) == ("streamed", (1,), (1,))
    prices = dict(usual.seconds)
    assert prices["streamed"] < 0.65 * prices["direct"]
    assert 0 < usual.wrong_guess < prices["direct"] - prices["streamed"]
    text = str(decision)
    assert "by streamed in " in text and "1 own nothing, 1 for a narrow port (" in text
    assert "links of 0.100 ms and 100 MB/s, 50 MB/s to replica 1; where ports are alike it takes " in text
    assert text.endswith(" ms more than direct; up to 54.9 MiB wait for a replica with a narrow port")
    for step in range(2 * WELL):
        # Behind a late rank the results take as long through the narrow port, whoever owns them.
        decision.observe(arrivals(8, (4,) if step > WELL else (), 2.0, chance))
        assert decision.choice.way == usual.way


def test_a_port_that_is_hardly_narrow_or_too_little_memory_leaves_direct() -> None:
    slightly = Ports(LINK.latency, (LINK.per_byte, 1.1 * LINK.per_byte, *(LINK.per_byte,) * 6))
    for ports, memory in ((slightly, NBYTES), (NARROW, NBYTES // 2)):
        choice = LateRanks(NBYTES, ports, memory).choice
        assert choice.way.algorithm == "direct" and "direct" in dict(choice.seconds)


def test_noise_changes_nothing_beside_a_narrow_port() -> None:
    decision, chance = LateRanks(16 << 20, Ports(1e-4, (1e-9, 3e-9, *(1e-9,) * 3)), NBYTES), random.Random(5)
    usual = decision.choice.way
    assert usual.narrow == (1,)
    for _ in range(2000):
        decision.observe([_skewed(chance, rank) for rank in range(5)])
        assert decision.choice.way == usual


def narrow_to(ranks: int, narrow: int, times: float = 2.0) -> Ports:
    links = {(one, other): LINK for one in range(ranks) for other in range(one)}
    return measured_ports({pair: Link(LINK.latency, LINK.per_byte * (times if narrow in pair else 1)) for pair in links}, ranks)


def observed(decision: LateRanks, chance: random.Random, took: float, steps: int, noise: float = 0.05) -> list[bool]:
    """Whether the decision asks for the ports after each of some sums of noisy seconds."""
    asked: list[bool] = []
    for _ in range(steps):
        decision.observe(arrivals(8, (), 0.0, chance), took * chance.lognormvariate(0.0, noise))
        asked.append(decision.asks)
    return asked


@pytest.mark.parametrize("narrow", [0, 3, 7])
def test_a_port_that_turns_narrow_is_measured_after_three_sums_and_again_until_it_is_wide(narrow: int) -> None:
    decision, chance = LateRanks(NBYTES, alike(8, LINK), NBYTES, None, probed=1 << 20), random.Random(narrow)
    assert not any(observed(decision, chance, 1.2, 20))
    assert observed(decision, chance, 2.4, STEPS_IN_A_ROW) == [False, False, True]
    decision.measured(narrow_to(8, narrow))
    assert (decision.choice.way.algorithm, decision.choice.way.late, decision.choice.way.narrow) == (
        "streamed",
        (narrow,),
        (narrow,),
    )
    way = decision.choice.way
    asked = observed(decision, chance, 1.5, 100)
    assert asked.index(True) >= REMEMBERED - 1, "sums don't tell that it is wide again, so ports are measured now and then"
    decision.measured(narrow_to(8, narrow))
    assert decision.choice.way == way, "it is still narrow"
    decision.measured(alike(8, LINK))
    assert decision.choice.way.algorithm == "direct"
    assert not any(observed(decision, chance, 1.2, 200))


def test_sums_that_all_take_longer_have_ports_measured_once() -> None:
    decision, chance = LateRanks(NBYTES, alike(8, LINK), NBYTES, None, probed=1 << 20), random.Random(1)
    observed(decision, chance, 1.2, 20)
    assert any(observed(decision, chance, 3.0, STEPS_IN_A_ROW))
    decision.measured(alike(8, Link(LINK.latency, 2.5 * LINK.per_byte)))
    assert decision.choice.way.algorithm == "direct"
    assert not any(observed(decision, chance, 3.0, 200))


@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_noise_has_no_ports_measured(noise: float) -> None:
    """Two hours of steps of a second."""
    decision, chance = LateRanks(NBYTES, alike(8, LINK), NBYTES, None, probed=1 << 20), random.Random(2)
    assert sum(observed(decision, chance, 0.5, 7200, noise)) == 0


def test_ports_are_measured_for_no_late_rank() -> None:
    decision, chance = LateRanks(NBYTES, alike(8, LINK), NBYTES, None, probed=1 << 20), random.Random(3)
    observed(decision, chance, 1.2, 20)
    for _ in range(40):
        decision.observe(arrivals(8, (2,), 0.7, chance), 3.0)
        assert not decision.asks


def test_choices_for_all_delays_have_few_sizes_of_messages() -> None:
    """The delegate keeps memory for each size."""
    sizes: set[int] = set()
    for delay in (0.01 * 1.1**power for power in range(60)):
        decision, chance = decided(5), random.Random(5)
        for step in range(WELL + LATER):
            decision.observe(arrivals(5, (1,) if step >= WELL else (), delay, chance))
        sizes.add(decision.bucket_of(decision.choice.way))
    assert 1 < len(sizes) <= 1 + (NBYTES // LEAST_BYTES).bit_length()
    assert all(one % NBYTES == 0 or NBYTES % one == 0 for one in sizes)
