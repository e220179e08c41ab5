"""Placements: what each makes of the same pieces, and that the choice sees how often a slow link is crossed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adaptra.errors import CaseError, PlanError
from adaptra.planning.layouts.choose_placement import Links, choose_placement, placed_case
from adaptra.program.placement import in_turn, v_shaped
from adaptra.program.schedules import generate_for
from adaptra.program.verify import verify
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

EIGHT = CostModel.uniform(8, 5, 5, 5)


def slow(delay: float) -> Links:
    """Four ranks whose middle link takes so long, each way."""
    return Links({(1, 2): delay, (2, 1): delay})


def test_placements_are_those_of_the_schedules() -> None:
    assert in_turn(3) == (0, 1, 2)
    assert in_turn(2, 3) == (0, 1, 0, 1, 0, 1)
    assert v_shaped(3) == (0, 1, 2, 2, 1, 0)


def test_pieces_are_merged_and_every_edge_costs_what_its_link_does() -> None:
    pieces = replace(CostModel.uniform(8, 1, 2, 3), forward=(1, 2, 3, 4, 5, 6, 7, 8), memory_limit=(9.0, 9.0))
    links = Links({(0, 1): 4.0}, {(1, 0): 0.5}, usual_latency=1.0, usual_occupancy=0.25)
    case = placed_case(pieces, 3, v_shaped(2), links, "v")
    assert case.cost.forward == (3, 7, 11, 15)
    assert (case.cost.input_grad, case.cost.weight_grad, case.cost.memory_forward) == ((4,) * 4, (6,) * 4, (2,) * 4)
    assert (case.cost.latency_forward, case.cost.latency_backward) == ((4, 0, 1), (1, 0, 4))
    assert (case.cost.occupancy_forward, case.cost.occupancy_backward) == ((0.25, 0, 0.5), (0.5, 0, 0.25))
    assert case.cost.memory_limit == (9, 9)


@pytest.mark.parametrize("memory", [None, 12.0])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_on_fast_links_two_chunks_win_and_on_a_slow_one_a_single(microbatches: int, memory: float | None) -> None:
    pieces = EIGHT if memory is None else replace(EIGHT, memory_limit=(memory,) * 4)
    fast = choose_placement(pieces, microbatches, 4, slow(0))
    assert fast[-1].name == "straight"
    assert {placed.name for placed in fast} == {"straight", "interleaved-2", "v"}
    late = choose_placement(pieces, microbatches, 4, slow(40))
    assert late[0].name == "straight"
    assert late[0].simulation.makespan < late[1].simulation.makespan


def test_of_placements_as_fast_the_one_with_less_memory_is_first() -> None:
    """ZB-V needs half the memory of interleaving for the same step."""
    first, second, _ = choose_placement(EIGHT, 12, 4, Links())
    assert (first.name, second.name) == ("v", "interleaved-2")
    assert first.simulation.makespan == second.simulation.makespan
    assert max(first.simulation.peak_memory) < max(second.simulation.peak_memory)


def test_every_plan_is_valid_above_its_bound_and_as_short_as_the_literatures() -> None:
    first, second, third = (tuple(float(3 + stage * step % 5) for stage in range(12)) for step in (1, 2, 3))
    free = (0.0,) * 11
    pieces = CostModel(first, second, third, free, free, free, free)
    found = choose_placement(pieces, 7, 2, Links(usual_latency=2.0, usual_occupancy=1.0))
    assert {placed.name for placed in found} == {"straight", "v", "interleaved-2", "interleaved-3", "interleaved-6"}
    names = {"straight": "1f1b", "v": "zbv"}
    for placed in found:
        verify(placed.program)
        assert placed.simulation.makespan >= placed.bound.value * (1 - 1e-9)
        known = generate_for(names.get(placed.name, "interleaved"), placed.case.placement, 7)
        assert placed.simulation.makespan <= simulate(known, placed.case.cost).makespan
    steps = [placed.simulation.makespan for placed in found]
    assert steps == sorted(steps)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(CaseError, match=r"^8 pieces on 3 ranks: expected as many on each rank$"):
        choose_placement(EIGHT, 4, 3, Links())
    with pytest.raises(CaseError, match=r"^case: 8 pieces: expected a multiple of 3 stages$"):
        placed_case(EIGHT, 4, (0, 1, 2), Links(), "case")
    with pytest.raises(PlanError, match=r"^memory limit of rank 0 is 1: one microbatch holds 2, the smallest that works$"):
        choose_placement(replace(EIGHT, memory_limit=(1.0,) * 4), 4, 4, Links())
