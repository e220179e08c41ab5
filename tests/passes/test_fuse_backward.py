"""fuse-backward: B wherever the step is as short with it, and nowhere else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cost_models, programs

from adaptra.passes import FuseBackward, SplitBackward
from adaptra.program import Program
from adaptra.program.schedules import one_f_one_b
from adaptra.program.verify import verify
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

TEN = CostModel.uniform(3, 10, 10, 10)


@settings(deadline=None, max_examples=100)
@given(programs(lowered=False), st.data())
def test_nothing_is_lost(program: Program, data: st.DataObject) -> None:
    cost = data.draw(cost_models(program.stages))
    before = simulate(program, cost)
    found = FuseBackward().apply(program, cost)
    verify(found)
    after = simulate(found, cost)
    assert after.makespan <= before.makespan * (1 + 1e-9)
    assert all(mine <= most for mine, most in zip(after.peak_memory, before.peak_memory, strict=True))
    assert sorted(map(str, SplitBackward().apply(found, cost).orders)) == sorted(
        map(str, SplitBackward().apply(program, cost).orders)
    )


def test_a_program_of_b_stays() -> None:
    program = one_f_one_b(3, 4, split=False)
    assert FuseBackward().apply(program, TEN) is program
