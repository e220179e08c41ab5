"""News: what a rank need not tell, and that the detector finds the same without it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from measurements import HEALTHY, SLOW, measured

from adaptra.errors import ControlError
from adaptra.runtime.detection.detector import Detector
from adaptra.runtime.detection.news import REMEMBERED, NewsReader, NewsTeller
from adaptra.runtime.measuring.measurement import ReduceTimes, Stalls, StepMeasurement
from adaptra.simulation.cost import CostModel

PERIOD = 5


class Told:
    """Four ranks that tell, and a reader."""

    def __init__(self) -> None:
        self.tellers = [NewsTeller() for _ in range(4)]
        self.reader = NewsReader()
        self.number = 0

    def restored(self, steps: Sequence[Sequence[StepMeasurement]]) -> tuple[StepMeasurement, ...] | None:
        """What the reader makes of some steps' measurements."""
        news = [one for rank, teller in enumerate(self.tellers) for one in teller.tell([step[rank] for step in steps])]
        self.number += len(news)
        seconds = [max(one.seconds for one in step) for step in steps]
        told = sum(teller.told for teller in self.tellers)
        return self.reader.read(range(4), steps[-1][0].step, told, seconds, news)


def steps_of(costs: Sequence[CostModel], noise: float, seed: int, first: int = 0) -> list[list[StepMeasurement]]:
    """What four ranks measure in steps with these costs."""
    draw = random.Random(seed)
    return [measured(first + step, cost, noise=lambda: draw.gauss(1.0, noise)) for step, cost in enumerate(costs)]


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_at_rest_nothing_is_told_once_the_scatter_is_known(noise: float) -> None:
    told = Told()
    told.restored(steps_of([HEALTHY] * REMEMBERED, noise, 0))
    before = told.number
    restored = told.restored(steps_of([HEALTHY] * 50, noise, 1, REMEMBERED))
    assert told.number == before >= 4 * (REMEMBERED - 1)
    assert restored is not None and len(restored) == 200


def test_when_a_rank_reduced_is_not_known_of_steps_without_news() -> None:
    """That of an earlier step would be told twice."""
    teller, reader = NewsTeller(), NewsReader()
    reduce = ReduceTimes(0, 1.0, 0.5, 8)
    steps = [replace(step[2], reduce=reduce) for step in steps_of([HEALTHY] * (REMEMBERED + 4), 0.0, 0)]
    news = teller.tell(steps)
    restored = reader.read([2], len(steps) - 1, teller.told, [1.0] * len(steps), news)
    assert restored is not None and len(news) < len(restored)
    told = {one.step for one in news}
    assert [one.reduce for one in restored] == [reduce if step in told else None for step in range(len(steps))]


def test_values_that_scatter_are_all_told() -> None:
    told = Told()
    steps = steps_of([HEALTHY] * 60, 0.3, 0)
    assert told.restored(steps) == tuple(one for step in steps for one in step)
    assert told.number == 240


def test_what_is_counted_is_told_exactly() -> None:
    teller = NewsTeller()
    steps = [step[1] for step in steps_of([HEALTHY] * 40, 0.01, 0)]
    teller.tell(steps)
    still = replace(steps[-1], step=40)
    assert teller.tell([still]) == ()
    stalled = replace(still, edges=(replace(still.edges[0], stalls=Stalls(1, 2, 0.4)), *still.edges[1:]))
    fewer = replace(still, edges=(replace(still.edges[0], messages=3), *still.edges[1:]))
    paused = replace(still, pause=0.2)
    for changed in (stalled, fewer, paused):
        other = NewsTeller()
        other.tell(steps)
        assert other.tell([changed]) == (changed,)
    teller.forget()
    assert teller.tell([still]) == (still,)


def test_missed_news_are_noticed_and_what_is_told_later_is_taken() -> None:
    teller, reader = NewsTeller(), NewsReader()
    steps = [step[2] for step in steps_of([HEALTHY] * 40 + [SLOW] * 40, 0.01, 0)]
    seconds = [1.0] * 40
    news = teller.tell(steps[:40])
    assert reader.read([2], 39, teller.told, seconds, news) is not None
    assert teller.tell(steps[40:50]), "which the reader does not get"
    assert teller.tell(steps[50:55]) == ()
    assert reader.read([2], 54, teller.told, seconds[:5], ()) is None
    teller.forget()
    news = teller.tell(steps[55:60])
    restored = reader.read([2], 59, teller.told, seconds[:5], news)
    assert restored is not None and restored[0] == steps[55]


@pytest.mark.parametrize("of", [measured(9, HEALTHY)[2], measured(3, HEALTHY)[1]])
def test_news_of_another_rank_or_step_are_refused(of: StepMeasurement) -> None:
    with pytest.raises(ControlError, match=rf"news of rank {of.rank} in step {of.step}: expected a rank below the sender"):
        NewsReader().read([1], 9, 9, [1.0] * 5, [of])


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02, 0.04, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_the_detector_finds_in_what_is_told_all_that_it_finds_in_what_was_measured(noise: float, seed: int) -> None:
    """Of slow links and stages, and of their recovery, whether values scatter or not."""
    slow_stage = HEALTHY.with_stage(2, 1.3 * HEALTHY.forward[2], 1.3 * HEALTHY.input_grad[2], 1.3 * HEALTHY.weight_grad[2])
    costs = [HEALTHY] * 40 + [SLOW] * 25 + [HEALTHY] * 45 + [slow_stage] * 20 + [HEALTHY] * 20
    steps, told, exact, restoring = steps_of(costs, noise, seed), Told(), Detector(HEALTHY), Detector(HEALTHY)
    found: list[tuple[int, tuple[object, ...]]] = []
    found_restored: list[tuple[int, tuple[object, ...]]] = []
    for first in range(0, len(steps), PERIOD):
        restored = told.restored(steps[first : first + PERIOD])
        assert restored is not None
        for index, step in enumerate(steps[first : first + PERIOD]):
            for detector, seen, kept in (
                (exact, step, found),
                (restoring, restored[4 * index : 4 * index + 4], found_restored),
            ):
                if (detection := detector.observe(seen)) is not None:
                    kept.append((detection.step, tuple(change.where for change in detection.changes)))
    assert found_restored == found
    assert len(found) >= 5
    if noise <= 0.01:
        assert told.number < 4 * len(steps) / 2
