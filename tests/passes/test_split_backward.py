"""split-backward: I and W side by side where B was."""

from __future__ import annotations

from adaptra.passes import SplitBackward
from adaptra.program.schedules import one_f_one_b
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

COST = CostModel.uniform(3, 10, 10, 10, latency=5)


def test_what_has_no_b_comes_back_itself() -> None:
    program = one_f_one_b(3, 4)
    assert SplitBackward().apply(program, COST) is program


def test_the_split_makes_the_generators_split_form() -> None:
    fused = one_f_one_b(3, 4, split=False)
    split = SplitBackward().apply(fused, COST)
    assert split == one_f_one_b(3, 4)
    assert simulate(split, COST).makespan <= simulate(fused, COST).makespan
