"""What a sum over replicas takes by its rounds: exact where that can be said, and of the link that is slow, wherever it is."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adaptra.collectives.rounds import ALGORITHMS
from adaptra.collectives.seconds import DIRECT, SumPlan
from adaptra.simulation.links import Link

FAST = Link(1e-4, 1e-9)
NBYTES = 64_000_000


def over(nbytes: int, replicas: int, slow: dict[tuple[int, int], Link], plan: SumPlan = DIRECT, link: Link = FAST) -> float:
    return plan.seconds(nbytes, replicas, lambda one, other: slow.get((one, other), link))


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_terms_and_results_go_over_each_port_once(replicas: int) -> None:
    """All terms of one bucket are sent once places for them are known; its results follow when the last has arrived."""
    part = NBYTES / replicas
    each = 0.03 + (replicas - 1) * part * FAST.per_byte
    assert over(NBYTES, replicas, {}, SumPlan(bucket=NBYTES), Link(0.03, FAST.per_byte)) == pytest.approx(0.03 + 2 * each)


def test_two_replicas_by_a_chain_wait_for_the_result_of_each_part() -> None:
    part = NBYTES / 2 * FAST.per_byte
    found = over(NBYTES, 2, {}, SumPlan("chain", bucket=NBYTES), Link(0.03, FAST.per_byte))
    assert found == pytest.approx(3 * 0.03 + 3 * part)


@pytest.mark.parametrize("pair", [(0, 1), (0, 4), (3, 6)])
def test_a_narrow_link_counts_wherever_it_is(pair: tuple[int, int]) -> None:
    """Twenty times narrower: it carries two parts of each bucket, each way."""
    narrow = Link(FAST.latency, 20 * FAST.per_byte)
    assert over(NBYTES, 8, {pair: narrow}) > 2 * NBYTES / 8 * narrow.per_byte > 2 * over(NBYTES, 8, {})


def test_nothing_to_add_takes_no_time() -> None:
    assert over(NBYTES, 1, {}) == over(0, 4, {}) == 0.0


@example(2, 1, "direct", None, {(0, 1): Link(0.0625, 5e-324)})
@given(
    st.integers(2, 6),
    st.integers(1, 10**8),
    st.sampled_from([*ALGORITHMS]),
    st.sampled_from([None, 1 << 20]),
    st.dictionaries(
        st.sampled_from([pair for pair in permutations(range(6), 2) if pair[0] < pair[1]]),
        st.builds(Link, st.floats(0, 0.1), st.floats(0, 1e-7)),
    ),
)
def test_no_sum_is_faster_than_its_ports_nor_slower_than_rounds_in_lockstep(
    replicas: int, nbytes: int, algorithm: str, bucket: int | None, slow: dict[tuple[int, int], Link]
) -> None:
    found = over(nbytes, replicas, slow, SumPlan(algorithm, bucket))
    links = [slow.get(pair, FAST) for pair in permutations(range(replicas), 2) if pair[0] < pair[1]]
    fastest = Link(min(one.latency for one in links), min(one.per_byte for one in links))
    # Each replica has to get the other terms of its own parts and the results of the others' parts, or the whole by a chain.
    least = 2 * fastest.latency + nbytes / replicas * (replicas - 1) * fastest.per_byte
    assert found >= least * (1 - 1e-9)
    assert math.isfinite(found)
    slower = over(nbytes, replicas, {pair: Link(2 * one.latency, 2 * one.per_byte) for pair, one in slow.items()},
                  SumPlan(algorithm, bucket or 1 << 20), Link(2 * FAST.latency, 2 * FAST.per_byte))  # fmt: skip
    assert slower == pytest.approx(2 * over(nbytes, replicas, slow, SumPlan(algorithm, bucket or 1 << 20)))
