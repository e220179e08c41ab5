"""Which of several transports carries a message: what the program says from a step on."""

from typing import Any

import pytest
from transport_bodies import SMALL, forward, make, same

from adaptra.errors import ControlError, LaunchError, OptionError, TransportError
from adaptra.passes.insert_comm import InsertComm
from adaptra.passes.lower_comm import LowerComm
from adaptra.program import Program
from adaptra.program.schedules import gpipe
from adaptra.runtime.control.deciding.policy import _delegated
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.detection.changes import EdgeChange
from adaptra.runtime.detection.detector import Detection
from adaptra.runtime.launch.carriers import DelegateSetup
from adaptra.runtime.launch.launch import launch
from adaptra.runtime.options import Options
from adaptra.runtime.transports.base import Identity, Purpose
from adaptra.runtime.transports.lanes import LanedTransport
from adaptra.runtime.transports.local import LocalHub, LocalTransport
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

COST = CostModel.uniform(2, 0.01, 0.01, 0.01)


def lowered(*edges: tuple[int, int], lane: str = "delegate") -> Program:
    return LowerComm(slow=edges, lane=lane).apply(InsertComm().apply(gpipe(2, 2), COST), COST)


def rank_pair() -> tuple[list[LanedTransport], tuple[LocalTransport, LocalTransport]]:
    """Both ranks' ends of two hubs, and the receiver's ends of each hub."""
    first, second = LocalHub(2), LocalHub(2)
    ends = [(first.transport(rank), second.transport(rank)) for rank in range(2)]
    return [LanedTransport(default, {"delegate": lane}) for default, lane in ends], ends[1]


def test_messages_take_the_lane_that_the_program_names_from_its_step_on() -> None:
    (sender, receiver), (default, lane) = rank_pair()
    for one in (sender, receiver):
        one.use_lanes(0, lowered())
        one.use_lanes(3, lowered((0, 1)))
    receiver.reserve({(0, SMALL): 2})
    for step, carrier, other in ((2, default, lane), (3, lane, default), (9, lane, default)):
        identity = forward(0, step=step)
        sender.send(1, identity, make(identity))
        pending = receiver.receive(0, identity)
        assert same(pending.wait(1), make(identity))
        receiver.release(pending)
        late = forward(1, step=step)
        waiting = receiver.receive(0, late)
        assert carrier.waiting_for(0) == receiver.waiting_for(0) == late
        assert other.waiting_for(0) is None
        # A message held back by a fault still takes the lane of its own step.
        sender.send(1, late, make(late))
        waiting.wait(1)
        receiver.release(waiting)


def test_only_messages_of_the_program_take_a_lane() -> None:
    (sender, _), _ = rank_pair()
    sender.use_lanes(0, lowered((0, 1)))
    assert sender.lane_of(forward(0)) == "delegate"
    assert sender.lane_of(forward(0, step=-1)) is None, "an evaluation"
    assert sender.lane_of(Identity(0, Purpose.LOSS, 0, 1, 0, SMALL)) is None, "losses"
    assert sender.lane_of(Identity(0, Purpose.SHARED_GRADIENT, 0, 1, 0, SMALL)) is None, "gradients of shared parameters"
    assert sender.lane_of(Identity(0, Purpose.GRADIENT, 1, 0, 0, SMALL)) is None, "the other direction"


def test_a_lane_that_is_not_there_is_refused() -> None:
    (sender, _), (default, _) = rank_pair()
    with pytest.raises(TransportError, match="0SEND_F0@pigeon: expected one of the lanes delegate"):
        sender.use_lanes(0, lowered((0, 1), lane="pigeon"))
    with pytest.raises(TransportError, match="0SEND_F0@delegate: LocalTransport has no lanes"):
        default.use_lanes(0, lowered((0, 1)))


def test_an_abort_ends_waits_on_every_lane() -> None:
    (_, receiver), _ = rank_pair()
    receiver.use_lanes(1, lowered((0, 1)))
    receiver.reserve({(0, SMALL): 2})
    waits = [receiver.receive(0, forward(0, step=step)) for step in (0, 1)]
    receiver.abort(RuntimeError("the reason"))
    for wait in waits:
        with pytest.raises(RuntimeError, match="the reason"):
            wait.wait(1)
    receiver.close()


def plan(delegated: tuple[tuple[int, int], ...] = (), rounded: tuple[tuple[int, int], ...] = ()) -> Plan:
    return Plan(1, gpipe(2, 2), Case(COST, 2, (0, 1)), 0.1, 0.1, "a test", delegated, rounded)


@pytest.mark.parametrize("field", ["delegated", "rounded"])
def test_a_plan_carries_its_edges_and_they_are_part_of_what_ranks_confirm(field: str) -> None:
    found = plan(**{field: ((0, 1), (1, 0))})
    assert Plan.from_json(found.to_json()) == found
    assert len({found.digest, plan().digest, plan(((0, 1),)).digest, plan(rounded=((0, 1),)).digest}) == 4
    for wrong in ([[0, 2]], [[-1, 0]], [[0]], ["01"], [[0, "1"]]):
        with pytest.raises(ControlError, match=f"plan: field '{field}': expected pairs of neighbouring stages"):
            Plan.from_json(found.to_json() | {field: wrong})


def test_edges_that_turn_slow_take_the_delegate_and_come_back_once_healed() -> None:
    def change(source: int, was: float, now: float, is_healed: bool = False) -> EdgeChange:
        return EdgeChange(source, source + 1, was, now, 0.001, 0.0, 0.0, 0.0, is_healed)

    slow = Detection(4, (change(1, 0.001, 0.03), change(0, 0.03, 0.02)), COST)
    assert _delegated(plan(((2, 3),)), slow) == ((1, 2), (2, 3))
    healed = Detection(9, (change(1, 0.03, 0.001, is_healed=True),), COST)
    assert _delegated(plan(((1, 2), (2, 3))), healed) == ((2, 3),)


@pytest.mark.parametrize("delegate", ["1>2", 3, [(1, 3)], [(0, -1)], [1, 2], [("1", "2")]])
def test_what_is_no_edge_is_refused(delegate: Any) -> None:
    with pytest.raises(OptionError, match=r"delegate=.*: expected True, False or directed edges"):
        Options(delegate=delegate)


@pytest.mark.parametrize("addresses", ["10.0.0.1", [10], 7])
def test_what_is_no_address_is_refused(addresses: Any) -> None:
    with pytest.raises(OptionError, match=r"addresses=.*: expected a list of numeric addresses"):
        Options(addresses=addresses)


def test_the_delegate_takes_over_edges_of_c10d_and_nccl_only() -> None:
    with pytest.raises(LaunchError, match=r"Options\(delegate=...\) with transport 'local': expected c10d or nccl"):
        launch(2, "local", {}, 5, delegate=DelegateSetup(is_beside=True))
