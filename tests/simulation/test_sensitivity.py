"""Sensitivity: what it says an edge absorbs costs nothing, and anything more costs what it says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cost_models, programs

from adaptra.program import Program
from adaptra.program.schedules import forward_only, one_f_one_b, zb_h2
from adaptra.simulation.cost import Blocking, CostModel
from adaptra.simulation.sensitivity import EdgeSensitivity, sensitivity
from adaptra.simulation.simulate import simulate

TEN = CostModel.uniform(4, 10, 10, 10)


def delayed(program: Program, cost: CostModel, edge: EdgeSensitivity, delay: float) -> float:
    usual = cost.latency(edge.source, edge.destination)
    return simulate(program, cost.with_latency(edge.source, edge.destination, usual + delay)).makespan


def test_how_long_a_delay_is_paid_once_and_what_it_costs_in_the_end() -> None:
    """H2 keeps more microbatches in flight on every stage than 1F1B: it hides longer delays and pays fewer of them."""
    tight, loose = sensitivity(one_f_one_b(4, 12), TEN), sensitivity(zb_h2(4, 12), TEN)
    assert [(edge.absorbs, edge.slope, edge.once, edge.most) for edge in tight if edge.source < edge.destination] == [
        (0, 1, pytest.approx(15), 5),
        (0, 1, pytest.approx(12), 6),
        (0, 1, pytest.approx(10), 6),
    ]
    assert all(wide.once > narrow.once and wide.most < narrow.most for wide, narrow in zip(loose, tight, strict=True))


def test_every_directed_edge_has_one_entry_and_forward_only_programs_only_forward_edges() -> None:
    found = sensitivity(one_f_one_b(3, 4), CostModel.uniform(3, 1, 1, 1))
    assert [(edge.source, edge.destination) for edge in found] == [(0, 1), (1, 0), (1, 2), (2, 1)]
    found = sensitivity(forward_only(range(3), 4), CostModel.uniform(3, 1, 1, 1))
    assert found == (EdgeSensitivity(0, 1, 0.0, 1, math.inf, 1), EdgeSensitivity(1, 2, 0.0, 1, math.inf, 1))
    assert found[0].to_json()["once"] is None


def test_slack_that_can_be_counted_by_hand() -> None:
    """Two stages, one microbatch, W of stage 1 four times as long as what follows its I elsewhere: F I then W4 against I W."""
    cost = CostModel((1, 1), (1, 1), (1, 6), (0,), (0,), (0,), (0,))
    there, back = sensitivity(one_f_one_b(2, 1), cost)
    assert (there.absorbs, there.slope) == (0, 1)
    assert (back.absorbs, back.slope) == (4, 1)


@settings(max_examples=50)
@given(data=st.data())
def test_what_is_absorbed_costs_nothing_and_more_costs_the_slope(data: st.DataObject) -> None:
    program = data.draw(programs(lowered=False))
    cost = data.draw(cost_models(program.stages, whole=True))
    now = simulate(program, cost).makespan
    for edge in sensitivity(program, cost):
        assert delayed(program, cost, edge, edge.absorbs) == pytest.approx(now, rel=1e-8)
        more = 1e-4
        longer = delayed(program, cost, edge, edge.absorbs + more) - now
        assert longer == pytest.approx(more * edge.slope, rel=1e-3, abs=1e-9)
        assert 1 <= edge.slope <= edge.most
        assert edge.absorbs <= edge.once * (1 + 1e-9)
        if math.isfinite(edge.once):
            assert delayed(program, cost, edge, edge.once) <= (now + edge.once) * (1 + 1e-8)
            assert delayed(program, cost, edge, edge.once + more) > now + edge.once + more
        far = 3 * now + 1
        assert delayed(program, cost, edge, far + 1) - delayed(program, cost, edge, far) == pytest.approx(edge.most)


@pytest.mark.parametrize("change", [{"half_duplex": True}, {"blocking": Blocking.SEND}, {"blocking": Blocking.BOTH}], ids=str)
def test_in_other_modes_the_step_is_no_longer_at_the_delay_and_longer_beyond(change: dict[str, object]) -> None:
    program, cost = zb_h2(4, 8), replace(TEN.with_occupancy(1, 2, 3), **change)  # type: ignore[arg-type]  # a field of it
    now = simulate(program, cost).makespan
    for edge in sensitivity(program, cost):
        assert delayed(program, cost, edge, edge.absorbs) <= now * (1 + 1e-9)
        assert delayed(program, cost, edge, edge.absorbs + 1e-3) > now


def test_ops_and_messages_that_take_no_time_absorb_nothing() -> None:
    assert [edge.absorbs for edge in sensitivity(one_f_one_b(2, 2), CostModel.uniform(2, 0, 0, 0))] == [0, 0]
