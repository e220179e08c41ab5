"""What is slow in a job, and when a trial of other modes is due."""

from __future__ import annotations

import pytest

from adaptra.errors import ControlError
from adaptra.planning.synchrony.regime import Regime, WorkerTimes, times_of


def regime(*busy: float, exposed: float | None = 0.0) -> Regime:
    """Two places, each with as many workers as there are pairs of times."""
    return Regime.of([WorkerTimes(rank % 2, (one,), 1.0, exposed) for rank, one in enumerate(busy)])


def test_a_worker_is_compared_with_those_of_its_own_stages() -> None:
    found = regime(0.1, 0.3, 0.2, 0.3)
    assert found.slowness == (1.0, 1.0, 2.0, 1.0)
    assert found.is_wrong and str(found) == "rank 2 2×"
    assert not regime(0.1, 0.3, 0.105, 0.31).is_wrong
    assert str(regime(0.1, 0.3)) == "nothing is slow"


def test_sums_count_by_the_replica_that_waits_for_nobody() -> None:
    late = [WorkerTimes(0, (0.1,), 1.0, 0.9), WorkerTimes(0, (0.1,), 1.0, 0.02)]
    assert not Regime.of(late).is_wrong
    narrow = [WorkerTimes(0, (0.1,), 1.0, 0.9), WorkerTimes(0, (0.1,), 1.0, 0.5)]
    assert Regime.of(narrow).exposed == 0.5 and str(Regime.of(narrow)) == "sums 50% of a step"
    assert regime(0.1, 0.1, exposed=None).exposed is None


def by_turns(*rows: tuple[float, ...]) -> Regime:
    """One place, with each worker's times by step."""
    return Regime.of([WorkerTimes(0, row, 1.0, 0.0) for row in rows])


def test_workers_that_are_slow_by_turns_make_steps_longer_than_each_ones_median() -> None:
    found = by_turns((0.1, 0.2, 0.1, 0.1, 0.1, 0.2, 0.1), (0.1, 0.1, 0.1, 0.2, 0.1, 0.1, 0.2))
    assert found.slowness == (1.0, 1.0) and found.is_wrong
    assert found.turns == pytest.approx(0.5), "of 7 steps 4 are twice as long, and the longest one does not count"
    assert str(found) == "steps 50% longer by turns"
    even, longer = by_turns((0.1,) * 7, (0.1,) * 7), by_turns((0.1, 0.9, 0.1, 0.1, 0.1, 0.9, 0.9), (0.1,) * 7)
    assert longer.turns > 2, "by how much is chance, with pauses"
    assert not found.is_due(found) and not longer.is_due(found)
    assert found.is_due(even) and even.is_due(found)


def test_what_comes_once_or_stays_is_not_by_turns() -> None:
    once = by_turns((5.0, 0.1, 0.1, 0.1), (6.0, 0.1, 0.1, 0.1))
    assert once.turns == pytest.approx(0) and not once.is_wrong
    lasting = by_turns((0.2,) * 4, (0.1,) * 4)
    assert lasting.turns == pytest.approx(0) and lasting.slowness == (2.0, 1.0)
    longer = by_turns((0.1, 0.2, 0.1, 0.1), (9.0, 0.1, 0.1, 0.1, 0.1, 0.1))
    assert longer.turns == pytest.approx(0), "the last steps of both are compared"


def test_a_trial_is_due_once_for_each_regime() -> None:
    healthy, slow, slower = regime(0.1, 0.1, 0.1, 0.1), regime(0.1, 0.1, 0.2, 0.1), regime(0.1, 0.1, 0.4, 0.1)
    assert not healthy.is_due(None) and slow.is_due(None)
    assert not slow.is_due(slow) and not regime(0.1, 0.1, 0.21, 0.1).is_due(slow)
    assert slower.is_due(slow) and healthy.is_due(slow)
    assert regime(0.1, 0.1, exposed=0.5).is_due(regime(0.1, 0.1))
    assert not regime(0.1, 0.1, exposed=None).is_due(regime(0.1, 0.1, exposed=0.5)), "other modes have no such sums"


def test_medians_are_told_and_what_is_not_is_refused() -> None:
    times = times_of(3, [(0.1, 1.0, None), (0.3, 3.0, 0.2), (0.2, 2.0, 0.4)])
    assert times == WorkerTimes(3, (0.1, 0.3, 0.2), 2.0, (0.2 + 0.4) / 2) and times.busy == 0.2
    assert WorkerTimes.decode(times.encode()) == times
    for text in ("[]", "[1, 2]", "[0, [], 1, 1]", '[0, ["a"], 1, 1]', "[0, [NaN], 1, null]", "[0, [1], 1, NaN]"):
        with pytest.raises(ControlError, match="times of a worker"):
            WorkerTimes.decode(text)
