"""What helps an edge whose bandwidth binds: every remedy is planned for, and what it promises is what its plan takes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from models import square_loss
from strategies import cases
from torch import nn

from adaptra.graph import compile_stages
from adaptra.planning.explaining.explanation import explain
from adaptra.planning.layouts.layout_change import SplitChange
from adaptra.planning.planner import plan
from adaptra.planning.remedies.bandwidth_remedies import (
    BandwidthOptions,
    Remedies,
    Remedy,
    bound_edges,
    choose_split,
    find_remedies,
    needed_rounding,
)
from adaptra.planning.routes.joined_programs import join
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.cut_points import CutPoint, CutPoints, positions_of
from adaptra.simulation.simulate import simulate

TEN = CostModel.uniform(4, 10, 10, 10)
FULL = TEN.with_occupancy(1, 2, 50)
ALONE = (0, 1, 2, 3)
PLACES = CutPoints(
    (CutPoint("b", 600, 100.0), CutPoint("d", 600, 200.0), CutPoint("f", 600, 300.0)),
    (
        CutPoint("a", 60, 50.0),
        CutPoint("b", 600, 100.0),
        CutPoint("c", 150, 180.0),
        CutPoint("e", 900, 250.0),
        CutPoint("g", 60, 390.0),
    ),
    400.0,
)


def case(cost: CostModel, microbatches: int = 12) -> Case:
    return Case(cost, microbatches, ALONE)


def remedies(
    cost: CostModel,
    bandwidth: BandwidthOptions | None = None,
    spread: tuple[tuple[int, int], ...] = (),
    rounded: tuple[tuple[int, int], ...] = (),
) -> Remedies | None:
    return find_remedies(case(cost), plan(case(cost)), spread, rounded, bandwidth=bandwidth or BandwidthOptions())


@pytest.mark.parametrize("cost", [TEN, TEN.with_latency(1, 2, 600), TEN.with_occupancy(1, 2, 30)])
def test_latency_and_what_compute_hides_need_no_remedy(cost: CostModel) -> None:
    assert remedies(cost) is None


def test_both_directions_of_a_shared_edge_count() -> None:
    each = TEN.with_occupancy(1, 2, 20).with_occupancy(2, 1, 20)
    assert bound_edges(case(each)) == ((), 30)
    assert bound_edges(case(replace(each, half_duplex=True))) == (((1, 2), (2, 1)), 30)


def test_one_microbatch_is_followed_by_none() -> None:
    assert bound_edges(case(FULL, microbatches=1))[0] == ()


def test_rounding_is_planned_for_with_half_the_occupancy() -> None:
    found = remedies(FULL, BandwidthOptions(rounds=True))
    assert found is not None and found.edges == ((1, 2),) and (found.occupancy, found.load) == (50, 30)
    chosen = found.best(Remedy.ROUNDING)
    assert chosen is not None and chosen.cost == TEN.with_occupancy(1, 2, 25)
    assert chosen.makespan == simulate(chosen.program, chosen.cost).makespan < 0.75 * found.makespan
    assert "limited by the bandwidth of edge 1→2" not in str(found).split("rounding to bfloat16")[1].split("\n")[0]


def test_what_users_have_not_allowed_is_told_and_not_taken() -> None:
    found = remedies(FULL)
    assert found is not None and found.best(Remedy.ROUNDING) is None and found.best(Remedy.PATHS) is None
    assert "Options(lossy_bf16='slow') allows it" in str(found) and "Options(delegate=True) tries them" in str(found)


def test_what_is_used_already_is_no_remedy() -> None:
    found = remedies(FULL, BandwidthOptions(spreads=True, rounds=True), spread=((1, 2),), rounded=((1, 2),))
    assert found is not None and found.choices == ()
    assert "nothing known would help" in str(found)


def test_a_cut_where_less_is_sent_is_worth_some_imbalance() -> None:
    found = remedies(FULL, BandwidthOptions(cut_points=PLACES))
    assert found is not None
    cuts = [choice for choice in found.choices if choice.remedy is Remedy.CUT]
    assert [choice.wanted for choice in cuts] == ["pipe.take_split(['b', 'c', 'f'], optimizer) moves it"]
    assert "stage 2 beginning at 'c', 150 bytes a message instead of 600" in str(found)
    assert cuts[0].cost.occupancy_forward == (0, 12.5, 0) and cuts[0].cost.occupancy_backward == (0, 0, 0)
    assert cuts[0].cost.forward == pytest.approx((10, 8, 12, 10)) and cuts[0].makespan < 0.75 * found.makespan


def known(places: CutPoints) -> CutPoints:
    """The same in a captured model, in which stages can begin there."""
    chosen, possible = ([replace(one, position=int(one.work)) for one in some] for some in (places.chosen, places.possible))
    return replace(places, chosen=tuple(chosen), possible=tuple(possible))


def test_a_cut_that_wins_more_than_it_costs_is_chosen() -> None:
    def choose(
        places: CutPoints, moving: tuple[float, float] | None, horizon: int = 100, cost: CostModel = FULL
    ) -> tuple[SplitChange, tuple[CutPoint, ...]] | None:
        bandwidth = BandwidthOptions(cut_points=places)
        return choose_split(case(cost), plan(case(cost)), (), (), bandwidth, horizon, lambda _: moving)

    chosen = choose(known(PLACES), (1000.0, 6000.0))
    assert chosen is not None
    change, places = chosen
    assert (change.before, change.after) == (("b", "d", "f"), ("b", "c", "f")) and positions_of(places) == (100, 180, 300)
    assert change.moving == 1000 + 6000 * 50 / 600 and change.saved(100) > 0
    assert str(change).startswith("stage 2 beginning at 'c' instead of 'd': ")
    assert choose(known(PLACES), (1000.0, 0.0), horizon=1) is None, "it takes longer than it saves"
    assert choose(known(PLACES), None) is None, "no stage can begin there after all"
    assert choose(PLACES, (0.0, 0.0)) is None, "nothing was captured"
    assert choose(known(PLACES), (0.0, 0.0), cost=TEN) is None, "no bandwidth binds"


def test_a_cut_has_to_win_over_the_routes_that_run() -> None:
    """Their program is of all replicas, and a detour may have cured what a cut would."""
    running = join([plan(case(FULL))] * 2)
    bandwidth = BandwidthOptions(cut_points=known(PLACES))

    def choose(routed: float) -> tuple[SplitChange, tuple[CutPoint, ...]] | None:
        return choose_split(case(FULL), running, (), (), bandwidth, 100, lambda _: (0.0, 0.0), routed)

    slow = choose(routed=1e6)
    assert slow is not None and slow[0].seconds_before < 1e6
    assert choose(routed=slow[0].seconds_after) is None
    between = choose(routed=0.5 * (slow[0].seconds_after + slow[0].seconds_before))
    assert between is not None and slow[0].seconds_after < between[0].seconds_before < slow[0].seconds_before


def test_stages_begin_in_order_whatever_moves() -> None:
    assert [(move.to.module, move.split) for move in PLACES.moves(TEN, 1)] == [("a", ("a", "d", "f")), ("c", ("c", "d", "f"))]
    assert [move.to.module for move in PLACES.moves(TEN, 3)] == ["g"]


def test_a_cut_that_moves_work_to_the_right_or_left_loses_none() -> None:
    for stage in (1, 2, 3):
        for move in PLACES.moves(TEN, stage):
            assert sum(move.cost.forward) == pytest.approx(sum(TEN.forward))
            assert min(move.cost.forward) > 0


@pytest.mark.parametrize(("rounded_time", "kept"), [(14, ()), (15, ()), (16, ((1, 2),)), (40, ((1, 2),))])
def test_an_edge_rounds_no_longer_than_it_would_bind_as_it_is(rounded_time: float, kept: tuple[tuple[int, int], ...]) -> None:
    assert needed_rounding(case(TEN.with_occupancy(1, 2, rounded_time)), ((1, 2),)) == kept


@settings(max_examples=30, deadline=None)
@given(cases())
def test_no_remedy_promises_more_than_its_bound(found: Case) -> None:
    program = plan(found)
    remedies = find_remedies(found, program, bandwidth=BandwidthOptions(spreads=True, rounds=True))
    assert (remedies is None) == (not bound_edges(found)[0])
    if remedies is not None:
        assert list(remedies.choices) == sorted(remedies.choices, key=lambda choice: choice.makespan)
        for choice in remedies.choices:
            assert choice.bound.value <= choice.makespan * (1 + 1e-9)
            assert choice.makespan <= remedies.makespan * (1 + 1e-9)


def test_an_explanation_says_what_bound_remains() -> None:
    explanation = explain(plan(case(FULL)), FULL)
    assert "bandwidth of edge 1→2: a message occupies it for 50" in str(explanation)
    assert json.loads(json.dumps(explanation.to_json()))["remedies"]["edges"] == [[1, 2]]
    assert explain(plan(case(TEN)), TEN).to_json()["remedies"] is None


class Waist(nn.Module):
    """Wide layers, and a narrow one before the last third."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (64, 64, 64, 64, 8, 64, 64)
        self.layers = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_the_model_can_be_cut_as_a_remedy_says() -> None:
    inputs = torch.ones(4, 64)
    wide = compile_stages(Waist(), (inputs,), {}, stages=2, loss=square_loss, targets=inputs, split=["layers.2"])
    assert (wide.cut_points.chosen[0].module, wide.cut_points.chosen[0].bytes) == ("layers.2", wide.train[0].output_bytes)
    narrow = min(wide.cut_points.moves(CostModel.uniform(2, 1, 1, 1), 1), key=lambda move: move.to.bytes)
    assert narrow.split == ("layers.4",)
    cut = compile_stages(Waist(), (inputs,), {}, stages=2, loss=square_loss, targets=inputs, split=["layers.4"])
    assert cut.train[0].output_bytes == narrow.to.bytes == 4 * 8 * 4 < wide.train[0].output_bytes
