"""What is in each update of the simulated clock: every microbatch once and in order, none too old, each at its moment."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice, pairwise

import pytest

from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.clock import TimedUpdate, draw_times, pace_of, updates_of
from adaptra.planning.synchrony.modes import Deadline, Local, Mode, Synchronous, XOrder

JITTER = SynchronyCase(5, 1000, {3: 1.5}, jitter=0.3, pauses=0.05, microbatches=4, exchange=0.1)
ALIKE = SynchronyCase(3, 1000, {}, microbatches=2)
MODES = (
    Synchronous(),
    Synchronous(stealing=True),
    Deadline(0.7),
    Local(3),
    XOrder(x=1),
    XOrder(x=1, staleness=3),
    XOrder(x=4, staleness=1),
    XOrder(x=5, staleness=0),
    XOrder(groups="auto", staleness=2),
    XOrder(groups=((0, 4), (1, 2, 3))),
)


def first(count: int, mode: Mode, case: SynchronyCase, times: Sequence[Sequence[float]] | None = None) -> list[TimedUpdate]:
    return [*islice(updates_of(mode, case, draw_times(case) if times is None else times), count)]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_each_microbatch_is_in_one_update_in_the_order_of_its_replica(mode: Mode) -> None:
    updates = first(400, mode, JITTER)
    assert all(before.moment <= after.moment for before, after in pairwise(updates))
    taken = [0] * JITTER.replicas
    for number, update in enumerate(updates):
        assert len({part.replica for part in update.parts}) == len(update.parts), "a replica is in an update once"
        assert update.microbatches > 0
        for replica, microbatches, age in update.parts:
            assert microbatches.start == taken[replica], f"update {number} leaves out or repeats some of replica {replica}"
            assert 0 <= age <= number
            taken[replica] = microbatches.stop
    assert min(taken) > 0


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_age_is_the_updates_since_the_replica_began(mode: Mode) -> None:
    """A step begins with the parameters of the last update that its replica was in."""
    limit = mode.staleness if isinstance(mode, XOrder) else 0
    began = [0] * JITTER.replicas
    for number, update in enumerate(first(400, mode, JITTER)):
        for replica, _, age in update.parts:
            assert limit is None or age <= limit
            if isinstance(mode, XOrder):
                assert age == number - began[replica]
            began[replica] = number + 1


def test_what_a_deadline_lacks_is_deferred_to_the_next_step() -> None:
    updates = first(3, Deadline(0.75), SynchronyCase(2, 1000, {1: 4.0}, microbatches=4))
    # The slow one has its first and one more, later also two that were deferred. The fast one is done meanwhile.
    assert [[(part.replica, part.microbatches) for part in update.parts] for update in updates] == [
        [(0, range(4)), (1, range(2))],
        [(0, range(4, 8)), (1, range(2, 6))],
        [(0, range(8, 12)), (1, range(6, 10))],
    ]
    assert {part.age for update in updates for part in update.parts} == {0}
    assert [update.moment for update in updates] == pytest.approx([2.0, 6.0, 10.0])


def test_a_late_report_joins_the_next_update_which_waits_where_it_would_be_too_old_in_a_later_one() -> None:
    times = [[1.0, 1.0, 2.5]]
    free = first(3, XOrder(x=2), ALIKE, times)
    assert [[(part.replica, part.age) for part in update.parts] for update in free] == [
        [(0, 0), (1, 0)],
        [(0, 0), (1, 0)],
        [(2, 2), (0, 0)],
    ]
    assert [update.moment for update in free] == [1.0, 2.0, 3.0]
    bound = first(4, XOrder(x=2, staleness=1), ALIKE, times)
    assert [[(part.replica, part.age) for part in update.parts] for update in bound] == [
        [(0, 0), (1, 0)],
        [(0, 0), (1, 0), (2, 1)],
    ] * 2
    assert [update.moment for update in bound] == [1.0, 2.5, 3.5, 5.0]


def test_replicas_with_local_steps_meet_at_an_exchange_only() -> None:
    times = [[1.0, 2.0, 1.0], [2.0, 1.0, 1.0]]
    case = SynchronyCase(3, 1000, {}, microbatches=2, exchange=5.0)
    updates = first(4, Local(2), case, times)
    assert [update.exchanged for update in updates] == [False, True, False, True]
    assert [update.moment for update in updates] == [2.0, 8.0, 10.0, 16.0]


def test_a_pace_is_the_mean_of_its_updates() -> None:
    chance = random.Random(3)
    for _ in range(20):
        case = SynchronyCase(chance.randint(2, 6), 1000, {0: 1 + chance.random()}, jitter=0.5, microbatches=3, exchange=0.2)
        times = draw_times(case, seed=chance.randrange(100))[:64]
        for mode in (Synchronous(), Synchronous(stealing=True), Deadline(0.8), Local(7), XOrder(x=2)):
            pace = pace_of(mode, case, times)
            updates = first(sum(pace.updates.values()), mode, case, times)
            assert pace.seconds == pytest.approx(updates[-1].moment / len(updates))
            samples = sum(update.microbatches for update in updates) * case.batch / case.microbatches
            assert pace.samples * len(updates) == pytest.approx(samples)
            used = [
                sum(len(part.microbatches) for update in updates for part in update.parts if part.replica == one)
                for one in range(case.replicas)
            ]
            assert max(used) >= 0.8 * 64 * case.microbatches
