"""The choice of a synchronisation mode: what is chosen, what is only tried, and why."""

from __future__ import annotations

import json

import pytest

from adaptra.planning.synchrony.case import SynchronyCase, parse_case
from adaptra.planning.synchrony.choice import ModeChoice, ModePrice


def unsteady(phi: float, *modes: str, allow: tuple[str, ...] = ()) -> SynchronyCase:
    return SynchronyCase(8, phi, {}, jitter=0.3, pauses=0.05, modes=modes, allow=allow)


def chosen(case: SynchronyCase) -> str:
    return str(ModeChoice(case).chosen.mode)


def price(choice: ModeChoice, mode: str) -> ModePrice:
    return next(one for one in choice.prices if str(one.mode) == mode)


@pytest.mark.parametrize("replicas", [1, 2, 8, 64])
@pytest.mark.parametrize("phi", [1, 1000, 1e6])
def test_nothing_wrong_is_exact_whatever_is_allowed(replicas: int, phi: float) -> None:
    choice = ModeChoice(SynchronyCase(replicas, phi, {}, allow=("x-order", "deadline", "local")))
    assert str(choice.chosen.mode) == "exact" and choice.trials == []
    assert next(choice.reasons()) == "exact keeps all replicas busy already"


def test_lasting_slowness_is_exact_by_shares_and_passing_slowness_by_stealing() -> None:
    assert chosen(SynchronyCase(8, 1000, {0: 2.0}, microbatches=16)) == "exact"
    assert chosen(unsteady(1000)) == "stealing"
    assert chosen(unsteady(1000, "deadline=0.9")) == "exact"  # not allowed
    assert chosen(unsteady(1000, "deadline=0.9", allow=("deadline",))) == "deadline=0.9"


def test_modes_without_a_formula_are_tried_and_never_chosen() -> None:
    case = SynchronyCase(8, 1000, {}, exchange=10.0, allow=("x-order", "local"))
    choice = ModeChoice(case)
    assert str(choice.chosen.mode) == "exact" and [str(one.mode) for one in choice.trials] == ["local=32"]
    assert price(choice, "local=32").time is None
    assert any(one.startswith("local=32: a step takes 0.119 of the choice's") for one in choice.reasons())
    unshared = ModeChoice(unsteady(1e6, "asynchronous", allow=("x-order",)))
    assert [str(one.mode) for one in unshared.trials] == ["asynchronous"] and str(unshared.chosen.mode) == "exact"
    assert [*unshared.reasons()][-1].endswith("a trial decides")
    closed = ModeChoice(unsteady(1e6, "asynchronous"))
    assert closed.trials == [] and [*closed.reasons()][-1].endswith("not allowed")


def test_a_deadline_that_is_not_allowed_is_named() -> None:
    choice = ModeChoice(unsteady(1000, "deadline=0.9"))
    assert [*choice.reasons()][-1].startswith("deadline=0.9 would take 3")
    assert [*choice.reasons()][-1].endswith("less, with other bits, and is not allowed")


@pytest.mark.parametrize("phi", [1, 1e6])
def test_what_is_deferred_comes_later_so_a_deadline_needs_no_more_updates(phi: float) -> None:
    choice = ModeChoice(unsteady(phi, "deadline=0.9"))
    assert price(choice, "deadline=0.9").to_json(choice.exact)["updates_of_exact"] == pytest.approx(1.0, rel=1e-3)


def test_the_json_of_a_choice_is_whole_and_its_case_reads_back() -> None:
    choice = ModeChoice(SynchronyCase(4, 500, {1: 3.0}, batch=64))
    found = json.loads(json.dumps(choice.to_json()))
    assert found["choice"] == "exact" and found["modes"][0]["mode"] == "exact"
    assert found["star"]["fastest"]["first"] == 3 and found["star"]["groups"]["sizes"] == [3, 1]
    again = parse_case(found["case"], "case")
    assert again.to_json() == found["case"]
    assert [str(mode) for mode in again.all_modes] == [str(mode) for mode in choice.case.all_modes]
    assert {one["trial"] for one in found["modes"] if one["kind"] in ("x-order", "local")} == {True}
