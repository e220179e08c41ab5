"""lower-comm: one slow edge moves alone."""

from __future__ import annotations

from adaptra.passes import InsertComm, LowerComm
from adaptra.program import Kind
from adaptra.program.dependencies import peer_stage
from adaptra.program.schedules import one_f_one_b
from adaptra.program.verify import verify
from adaptra.simulation.cost import CostModel

COST = CostModel.uniform(3, 10, 10, 10)
LOWERED = InsertComm(receives="late").apply(one_f_one_b(3, 4), COST)
FORWARD_ENDS = {Kind.SEND_F: 1, Kind.RECV_F: 2}


def test_exactly_the_named_direction_changes_lane() -> None:
    slow = LowerComm(slow=((1, 2),), lane="rdma").apply(LOWERED, COST)
    verify(slow)
    for order in slow.orders:
        for op in order:
            on_edge = FORWARD_ENDS.get(op.kind) == op.stage and {op.stage, peer_stage(op)} == {1, 2}
            assert op.lane == ("rdma" if on_edge else None), op
    assert slow == LOWERED, "ops and their order stay"
