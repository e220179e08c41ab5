"""The simulated clock of synchronisation modes: what is known in closed form, and what must hold whatever the times."""

from __future__ import annotations

import random

import pytest

from adaptra.equations.synchrony import synchrony_equations
from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.clock import Pace, capacity, draw_times, groups_by_speed, pace_of, shared_microbatches, stolen
from adaptra.planning.synchrony.modes import Deadline, Local, Mode, Synchronous, XOrder

EXACT, STEALING = Synchronous(), Synchronous(stealing=True)
SLOW = SynchronyCase(8, 1000, {0: 2.0}, microbatches=16, exchange=0.25)
JITTER = SynchronyCase(8, 1000, {3: 1.5}, jitter=0.3, pauses=0.05)


def pace(mode: Mode, case: SynchronyCase) -> Pace:
    return pace_of(mode, case, draw_times(case))


def test_without_jitter_paces_are_the_known_ones() -> None:
    assert shared_microbatches(SLOW) == [9] + [17] * 7
    assert pace(EXACT, SLOW).seconds == pytest.approx(18 / 16 + 0.25)
    assert pace(Deadline(1.0), SLOW).seconds == pytest.approx(synchrony_equations().exact.evaluate(2.0, 0.25))
    assert pace(XOrder(x=8), SLOW).seconds == pytest.approx(2.25)
    assert pace(XOrder(x=7), SLOW).seconds == pytest.approx(1.25, rel=1e-3)
    assert pace(XOrder(groups="auto"), SLOW).seconds == pytest.approx(1 / (1 / 1.25 + 1 / 2.25), rel=2e-3)
    assert pace(XOrder(x=1), SLOW).seconds == pytest.approx(1 / (7 / 1.25 + 1 / 2.25), rel=2e-3)
    assert pace(Local(4), SLOW).seconds == pytest.approx(synchrony_equations().local.evaluate(2.0, 0.25, 4))
    assert capacity(SLOW, draw_times(SLOW)) == pytest.approx(synchrony_equations().capacity.evaluate(8, 1 / 7.5, 0.25))


def test_all_reports_in_an_update_is_exact_without_sharing() -> None:
    everybody, deadline = pace(XOrder(x=8), JITTER), pace(Deadline(1.0), JITTER)
    assert everybody.seconds == pytest.approx(deadline.seconds, rel=1e-9)
    assert set(everybody.updates) == set(deadline.updates) == {(1024.0, 0.0)}
    together = pace(XOrder(groups=(tuple(range(8)),)), JITTER)
    assert together.seconds == pytest.approx(everybody.seconds) and together.most_age == 0


def test_age_is_that_of_the_reports_it_is_counted_for() -> None:
    alike = SynchronyCase(8, 1000, {})
    assert pace(XOrder(x=1), alike).age == pytest.approx(7, rel=0.01)
    assert pace(XOrder(x=8), alike).age == 0
    assert pace(XOrder(x=1), JITTER).most_age > 20


def test_no_gradient_is_older_than_the_limit_and_updates_wait_for_that() -> None:
    free, bound = pace(XOrder(x=1), JITTER), pace(XOrder(x=1, staleness=9), JITTER)
    assert bound.most_age <= 9 < free.most_age
    assert bound.seconds > free.seconds


def test_stealing_is_never_longer_than_shares_and_never_below_all_busy() -> None:
    chance = random.Random(5)
    for _ in range(300):
        replicas, count = chance.randint(1, 9), chance.randint(1, 12)
        row = [chance.lognormvariate(0, 0.6) for _ in range(replicas)]
        shares = shared_microbatches(SynchronyCase(replicas, 1, {0: 1 + chance.random()}, microbatches=count))
        alone = max(moment * share / count for moment, share in zip(row, shares, strict=True))
        busy = replicas / sum(1 / moment for moment in row)
        assert busy * (1 - 1e-9) <= stolen(row, shares, count) <= alone * (1 + 1e-12)


def test_stealing_takes_what_has_not_begun_and_nothing_else() -> None:
    assert stolen([1.0, 4.0], [4, 4], 4) == pytest.approx(2.0)  # at 1 the slow one has begun its second; 2 are taken by 1.5
    assert stolen([1.0, 4.0], [1, 1], 1) == 4.0  # one microbatch that has begun stays
    assert stolen([1.0, 1.0], [8, 8], 8) == 1.0


def test_jitter_is_what_was_measured_beside_real_gradients() -> None:
    """Prototypes had 0.529 and 0.501 for stealing without shares, with 8 and 16 microbatches.

    A deadline had 0.576, but threw away what was begun.
    """
    for count, most in ((8, 0.535), (16, 0.51)):
        case = SynchronyCase(8, 1000, {}, jitter=0.3, pauses=0.05, microbatches=count)
        times = draw_times(case, seed=1)
        exact = pace_of(EXACT, case, times).seconds
        assert capacity(case, times) < pace_of(STEALING, case, times).seconds <= most * exact
    assert pace_of(Deadline(0.9), case, times).seconds < 0.65 * exact


def test_groups_are_by_speed() -> None:
    assert groups_by_speed([0.3, 0.6, 0.3, 0.62]) == ((0, 2), (1, 3))
    assert groups_by_speed([0.3, 0.34], gap=0.05) == ((0, 1),)
