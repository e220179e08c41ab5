"""Responses: what is chosen, what each costs, what is refused and why."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from jobs import even_case

from adaptra.errors import CaseError
from adaptra.planning.responses.responses import Decision, Response, ResponseKind, ResponsePrices, decide
from adaptra.simulation.case import Case, WorkerLink

EFFORT = 60_000


def test_routes_are_taken_at_once_and_a_recut_follows_if_it_pays() -> None:
    case = replace(even_case(3, 4, 6, 3.0), lost=frozenset({6}))
    found = decide(case, ResponsePrices(), effort=EFFORT)
    assert str(found) == "reroute now, then re-cut"
    assert (found.healthy_period, found.one_f_one_b, found.work, found.fault_scaled_period) == (22, 30, 30, 24)
    assert found.first.period == 30
    assert found.seconds(found.last) < found.seconds(found.first)


def test_a_change_that_does_not_pay_within_the_horizon_does_not_follow() -> None:
    case = replace(even_case(3, 4, 6, 3.0), lost=frozenset({6}))
    found = decide(case, ResponsePrices(state=1e15), effort=EFFORT)
    assert str(found) == "reroute now"
    assert one(found, ResponseKind.RECUT).period is not None
    short = decide(case, ResponsePrices(horizon=1.0), effort=EFFORT)
    assert short.then is None


def test_two_losses_in_one_stage_make_a_worker_move() -> None:
    case = replace(even_case(3, 4, 6, 3.0), lost=frozenset({2, 6}))
    found = decide(case, ResponsePrices(pieces=1), effort=EFFORT)
    move = one(found, ResponseKind.MOVE)
    assert found.then is move
    assert move.what == "worker 3 leaves stage 3 of replica 0 for stage 2 of replica 0"
    assert (found.first.period, move.period) == (57, 30)
    assert move.cost == pytest.approx(16e9 / 10e9)


def test_memory_refuses_what_does_not_fit() -> None:
    case = replace(even_case(3, 4, 6, 3.0), lost=frozenset({2, 6}))
    found = decide(case, ResponsePrices(state=2**30, room=1.25 * 2**30, horizon=600), effort=EFFORT)
    assert one(found, ResponseKind.MOVE).what == "a worker that moves holds 2.0 GiB for a while: room for 1.2 GiB"
    assert one(found, ResponseKind.RECUT).what.endswith(" GiB for a while: room for 1.2 GiB")
    assert found.then is None
    crowded = replace(case, memory=(1, 1, 1, 1))
    assert decide(crowded, ResponsePrices(), effort=EFFORT).first.held == 1


def test_shrinking_waiting_and_restarting_cost_what_they_say() -> None:
    case = replace(even_case(4, 2, 6, 1.0), lost=frozenset({1, 2}))
    prices = ResponsePrices(joiner=60, restart=30, checkpoint_age=70)
    found = decide(case, prices, effort=EFFORT)
    shrink, wait, restart = (one(found, kind) for kind in (ResponseKind.SHRINK, ResponseKind.WAIT, ResponseKind.RESTART))
    assert shrink.what == "whole replicas only, 2, compute 12 microbatches each"
    assert shrink.period == 12 * 3 + 1
    assert shrink.cost == pytest.approx(1 + found.healthy_period * prices.unit)
    assert (wait.period, wait.cost) == (found.healthy_period, 60 + 1.6)
    assert restart.what.endswith("whole replicas, 3, compute 8 microbatches each")
    assert restart.cost == 100


def test_what_is_not_possible_says_why() -> None:
    case = replace(even_case(2, 2, 2), lost=frozenset({0, 3}))
    found = decide(case, ResponsePrices(), effort=EFFORT)
    assert one(found, ResponseKind.SHRINK).what == "every replica has a lost worker"
    assert one(found, ResponseKind.WAIT).what == "no worker is expected to join"
    assert all(math.isinf(found.seconds(each)) for each in found.responses if each.refused)


def test_a_slow_worker_shares_and_a_narrow_link_is_gone_round() -> None:
    slow = replace(even_case(4, 4, 8), slow={6: 2.0})
    found = decide(slow, ResponsePrices(pieces=1), effort=EFFORT)
    assert found.first.kind is ResponseKind.KEEP
    assert str(found) == "keep the plan, then share"
    assert found.last.period == pytest.approx(1.25 * found.healthy_period, rel=0.25)
    narrow = replace(even_case(2, 2, 16), links={(0, 1): WorkerLink(0, 6.0), (1, 0): WorkerLink(0, 6.0)})
    gone_round = decide(narrow, ResponsePrices(), effort=EFFORT)
    assert str(gone_round) == "keep the plan, then detour"
    assert gone_round.last.period is not None
    assert gone_round.first.period is not None
    assert gone_round.last.period < 0.7 * gone_round.first.period


def test_a_healthy_job_keeps_its_plan() -> None:
    found = decide(even_case(2, 2, 4), ResponsePrices(), effort=EFFORT)
    assert str(found) == "keep the plan"
    assert found.to_json()["responses"][0]["cost"] == 0.0


@pytest.mark.parametrize(
    ("name", "value"), [("unit", 0.0), ("rate", -1.0), ("state", math.nan), ("joiner", -1.0), ("restart", math.inf)]
)
def test_impossible_prices_are_refused(name: str, value: float) -> None:
    with pytest.raises(CaseError, match=f"^{name}: "):
        replace(ResponsePrices(), **{name: value})


def one(found: Decision, kind: ResponseKind) -> Response:
    (response,) = (each for each in found.responses if each.kind is kind)
    return response


def test_decisions_are_the_same_each_time() -> None:
    case: Case = replace(even_case(3, 3, 5, 2.0), lost=frozenset({4}))
    first, second = (decide(case, ResponsePrices(), effort=EFFORT) for _ in range(2))
    assert first.to_json() == second.to_json()
