"""fuse-backward: B wherever the step is as short with it, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cost_models, programs

from adaptra.errors import PassError
from adaptra.passes import FuseBackward, InsertComm, SplitBackward
from adaptra.planning.planner import plan
from adaptra.program import Kind, Program
from adaptra.program.schedules import gpipe, one_f_one_b
from adaptra.program.verify import verify
from adaptra.simulation.cost import Case, CostModel
from adaptra.simulation.simulate import simulate

TEN = CostModel.uniform(3, 10, 10, 10)


def fused(program: Program, stage: int) -> int:
    return sum(op.kind is Kind.B for op in program.orders[program.placement[stage]] if op.stage == stage)


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


def test_every_pair_of_stage_0_fuses() -> None:
    program = one_f_one_b(3, 6)
    assert fused(FuseBackward().apply(program, TEN), 0) == 6


def test_the_pair_that_others_wait_for_stays_split() -> None:
    """In gpipe the gradient of each microbatch goes straight on: with B each stage would start a W later."""
    program = gpipe(3, 1)
    found = FuseBackward().apply(program, TEN)
    assert [fused(found, stage) for stage in range(3)] == [1, 0, 0]


def test_a_stage_that_nobody_waits_for_fuses_too() -> None:
    """Stage 0 is so slow that the gradients of stage 1 wait for it anyway, all but the first."""
    cost = CostModel((50.0, 5.0), (50.0, 5.0), (50.0, 5.0), (0.0,), (0.0,), (0.0,), (0.0,))
    program = one_f_one_b(2, 8)
    found = FuseBackward().apply(program, cost)
    assert simulate(found, cost).makespan == simulate(program, cost).makespan
    assert fused(found, 1) >= 7


def test_adapted_plans_fuse_where_w_follows_its_i() -> None:
    case = Case(TEN, 6, (0, 1, 2))
    adapted = plan(case, in_flight=1)
    found = FuseBackward().apply(adapted, TEN)
    assert simulate(found, TEN).makespan == simulate(adapted, TEN).makespan
    assert any(op.kind is Kind.B for order in found.orders for op in order)


def test_a_program_of_b_stays() -> None:
    program = one_f_one_b(3, 4, split=False)
    assert FuseBackward().apply(program, TEN) is program


def test_refuses_a_lowered_program() -> None:
    lowered = InsertComm(receives="late").apply(gpipe(3, 2), TEN)
    with pytest.raises(PassError, match=r"fuse-backward: gpipe holds SEND and RECV ops: run fuse-backward before insert-comm"):
        FuseBackward().apply(lowered, TEN)


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("pass_fuse_backward.sched", str(FuseBackward().apply(one_f_one_b(3, 5), TEN)))
