"""lower-comm: one slow edge moves alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adaptra.errors import PassError
from adaptra.passes import InsertComm, LowerComm
from adaptra.program import Kind
from adaptra.program.dependencies import peer_stage
from adaptra.program.schedules import one_f_one_b
from adaptra.program.verify import verify
from adaptra.simulation.cost import CostModel

COST = CostModel.uniform(3, 10, 10, 10)
LOWERED = InsertComm(receives="late").apply(one_f_one_b(3, 4), COST)
FORWARD_ENDS = {Kind.SEND_F: 1, Kind.RECV_F: 2}


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("pass_lower_comm.sched", str(LowerComm(slow=((1, 2),)).apply(LOWERED, COST)))


def test_exactly_the_named_direction_changes_lane() -> None:
    slow = LowerComm(slow=((1, 2),), lane="rdma").apply(LOWERED, COST)
    verify(slow)
    for order in slow.orders:
        for op in order:
            on_edge = FORWARD_ENDS.get(op.kind) == op.stage and {op.stage, peer_stage(op)} == {1, 2}
            assert op.lane == ("rdma" if on_edge else None), op
    assert slow == LOWERED, "ops and their order stay"


def test_an_edge_that_recovered_goes_back() -> None:
    slow = LowerComm(slow=((0, 1), (1, 0))).apply(LOWERED, COST)
    assert "@delegate" in str(slow)
    assert str(LowerComm().apply(slow, COST)) == str(LOWERED)


def test_refuses_a_program_without_messages() -> None:
    with pytest.raises(PassError, match=r"lower-comm\{slow=0>1\}: 1f1b has no SEND and RECV to mark: run insert-comm first"):
        LowerComm(slow=((0, 1),)).apply(one_f_one_b(3, 4), COST)


def test_refuses_an_edge_without_messages() -> None:
    with pytest.raises(PassError, match=r"sends nothing over 0>2: expected some of 0>1 1>0 1>2 2>1"):
        LowerComm(slow=((0, 2),)).apply(LOWERED, COST)
