"""split-backward: I and W side by side where B was."""

from __future__ import annotations

from collections.abc import Callable

from adaptra.passes import SplitBackward
from adaptra.program import Program
from adaptra.program.schedules import one_f_one_b
from adaptra.program.verify import verify
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

COST = CostModel.uniform(3, 10, 10, 10, latency=5)


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("pass_split_backward.sched", str(SplitBackward().apply(one_f_one_b(3, 4, split=False), COST)))


def test_what_has_no_b_comes_back_itself() -> None:
    program = one_f_one_b(3, 4)
    assert SplitBackward().apply(program, COST) is program


def test_the_split_makes_the_generators_split_form() -> None:
    fused = one_f_one_b(3, 4, split=False)
    split = SplitBackward().apply(fused, COST)
    assert split == one_f_one_b(3, 4)
    assert simulate(split, COST).makespan <= simulate(fused, COST).makespan


def test_a_lowered_program_stays_valid() -> None:
    lowered = Program.parse(
        """\
schedule fused placement=0,1 microbatches=1
0: 0F0 0SEND_F0 0RECV_B0 0B0
1: 1RECV_F0 1F0 1B0 1SEND_B0
"""
    )
    split = SplitBackward().apply(lowered, CostModel.uniform(2, 1, 1, 1))
    verify(split)
    assert str(split).splitlines()[2] == "1: 1RECV_F0 1F0 1I0 1W0 1SEND_B0"
