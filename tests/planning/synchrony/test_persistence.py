"""Persistence: hazards against those that spells were drawn by, unseen ends, figures, and when "as last time" stays."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from adaptra.equations.persistence import persistence_equations
from adaptra.planning.synchrony.hazard import Spell, hazard_by_age, hazard_by_figures, lasting
from adaptra.planning.synchrony.persistence import AS_LAST_TIME, Persistence, best_wait, cost_of_waiting


def spells(lengths: list[int], worker: int = 0) -> list[Spell]:
    return [Spell(worker, length, True) for length in lengths]


def geometric(chance: random.Random, hazard: float) -> int:
    return max(1, math.ceil(math.log(1 - chance.random()) / math.log(1 - hazard)))


def seen(persistence: Persistence, lengths: list[int], worker: int = 0) -> Persistence:
    for length in lengths:
        for _ in range(length):
            persistence.slow(worker)
        persistence.ended(worker)
    return persistence


def test_without_a_spell_the_hazard_is_that_of_the_prior() -> None:
    assert [hazard_by_age([])(age, ()) for age in (1, 2, 100, 1 << 21)] == [1 / 32] * 4


def test_a_group_of_one_age_is_kaplan_and_meiers_with_the_prior() -> None:
    """Ages 1 and 2 have groups of their own. The prior is one of eight."""
    model, data = persistence_equations(), spells([1, 2, 2, 5])
    every = model.hazard.evaluate(4, 10, 0.5, 1 / 32)
    firsts = {worth: model.hazard.evaluate(1, 4, worth, every) for worth in (0.5, 2, 8, 32)}
    possible = [(first, model.hazard.evaluate(2, 3, worth, mean)) for worth, first in firsts.items() for mean in (every, first)]
    hazard = hazard_by_age(data)
    assert any((hazard(1, ()), hazard(2, ())) == pytest.approx(pair) for pair in possible)


@pytest.mark.parametrize("hazard", [0.02, 0.1, 0.5])
def test_a_constant_hazard_is_found_at_all_ages_though_many_ends_are_not_seen(hazard: float) -> None:
    chance = random.Random(1)
    data = [
        Spell(0, min(length, limit), length <= limit)
        for length, limit in ((geometric(chance, hazard), geometric(chance, hazard)) for _ in range(2000))
    ]
    assert 0.3 < sum(spell.has_ended for spell in data) / len(data) < 0.8
    estimate = hazard_by_age(data)
    oldest = sorted(spell.steps for spell in data)[-200]
    assert [estimate(age, ()) for age in range(1, oldest)] == pytest.approx([hazard] * (oldest - 1), rel=0.35)


def test_ends_that_are_not_seen_are_no_ends() -> None:
    cut = [Spell(0, 10, False)] * 20
    assert hazard_by_age(cut)(5, ()) < 0.01 and hazard_by_age(spells([10] * 20))(10, ()) > 0.4


def test_spells_of_one_length_go_on_until_it() -> None:
    goes_on = lasting(hazard_by_age(spells([20] * 40)), 1, 25)
    assert goes_on[16] > 0.85 and goes_on[25] < 0.05 and all(later <= before for before, later in pairwise(goes_on))


def test_a_worker_has_a_hazard_of_its_own_once_it_has_spells() -> None:
    data = [*spells([4] * 10, worker=0), *spells([40] * 10, worker=1)]
    short, long, unknown = (lasting(hazard_by_age(data, worker), 1, 10)[-1] for worker in (0, 1, 2))
    assert short < 0.2 < unknown < 0.8 < long
    assert unknown == lasting(hazard_by_age(data), 1, 10)[-1]


def test_figures_that_tell_causes_apart_tell_how_long_slowness_lasts() -> None:
    chance = random.Random(2)

    def spell(hazard: float, figure: float) -> Spell:
        length = geometric(chance, hazard)
        return Spell(0, length, True, tuple((figure + chance.gauss(0, 0.1), chance.random()) for _ in range(length)))

    data = [spell(0.3, 1.0) if chance.random() < 0.7 else spell(0.02, 0.0) for _ in range(150)]
    by_age = hazard_by_age(data)
    hazard = hazard_by_figures(data, by_age)
    assert 0.2 < hazard(1, (1.0, 0.5)) < 0.4 and hazard(1, (0.0, 0.5)) < 0.08 < by_age(1, ())
    assert hazard(3, ()) == by_age(3, ())  # this step has no figures
    assert hazard_by_figures(spells([3, 4]), by_age) is by_age
    same = [Spell(0, one.steps, True, ((1.0,),) * one.steps) for one in data]
    assert hazard_by_figures(same, by_age)(2, (5.0,)) == pytest.approx(by_age(2, ()), rel=0.5)  # it never differed: no effect


def least(hazard: float, age: int, price: float) -> int:
    costs = [
        sum((1 - hazard) ** step for step in range(1, wait + 1)) + price * (1 - hazard) ** wait
        for wait in range(math.ceil(price) + 1)
    ]
    return costs.index(min(costs))


@pytest.mark.parametrize("hazard", [0.01, 0.09, 0.12, 0.5])
@pytest.mark.parametrize("price", [1.0, 8.0, 64.0])
def test_the_best_wait_has_the_least_cost_by_the_equation(hazard: float, price: float) -> None:
    assert best_wait(lambda age, figures: hazard, 1, price) == least(hazard, 1, price)


@pytest.mark.parametrize("hazard", [0.001, 0.1, 0.9])
@pytest.mark.parametrize("length", [1, 2, 9, 17, 18, 500])
def test_decisions_cost_at_most_a_price_more_than_foresight_whatever_the_hazard(hazard: float, length: int) -> None:
    cost = cost_of_waiting(Spell(0, length, True), lambda age, figures: hazard, 16.0)
    assert min(length - 1, 16) <= cost <= 16 + min(length - 1, 16)
    if hazard == 0.9:
        assert cost == (length - 1 if length <= 16 else 16 + 16.0)


def test_as_last_time_stays_until_enough_spells_say_otherwise() -> None:
    persistence = Persistence()
    persistence.slow(0)
    assert persistence.advise(0, 16.0).basis == persistence.still_slow(0, 4).basis == AS_LAST_TIME
    assert persistence.still_slow(0, 4).chance == 1.0 and persistence.advise(0, 16.0).wait == 0
    persistence.ended(0)
    seen(persistence, [3] * 20).slow(0)
    advice, outlook = persistence.advise(0, 16.0), persistence.still_slow(0, 4)
    assert advice.basis == outlook.basis == "age" and advice.wait > 0 and outlook.chance < 0.2
    assert advice.rest is not None and 1.5 < advice.rest < 4
    assert persistence.advise(0, 1.0).basis == AS_LAST_TIME  # a change for one step of slowness pays at once


def test_slowness_that_lasts_is_as_last_time() -> None:
    persistence = seen(Persistence(), [400] * 12)
    persistence.slow(0)
    assert persistence.advise(0, 16.0).wait == 0 and persistence.still_slow(0, 4).chance > 0.99


@pytest.mark.parametrize("lengths", [lambda chance: geometric(chance, 0.3), lambda chance: 5])
def test_short_spells_cost_less_than_changes_at_once(lengths: Callable[[random.Random], int]) -> None:
    chance, price = random.Random(3), 24.0
    persistence, cost = seen(Persistence(), [lengths(chance) for _ in range(60)]), 0.0
    for _ in range(60):
        changed = None
        for age in range(lengths(chance)):
            persistence.slow(0)
            if changed is None and persistence.advise(0, price).wait == 0:
                changed = age + price
        cost += persistence.age(0) - 1 if changed is None else changed
        persistence.ended(0)
    assert cost < 0.5 * 60 * price


def test_a_worker_that_is_gone_ends_no_spell() -> None:
    persistence = Persistence()
    for _ in range(30):
        for _ in range(10):
            persistence.slow(4)
        persistence.lost(4)
    persistence.ended(4)  # it is not slow: nothing happens
    assert persistence.age(4) == 0 and persistence.still_slow(4, 3).chance == 0.0
    persistence.slow(4)
    assert persistence.advise(4, 8.0).basis == AS_LAST_TIME
