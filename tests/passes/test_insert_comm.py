"""insert-comm: every message has its SEND and RECV, where the transport's contract wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cost_models, programs

from adaptra.errors import PassError
from adaptra.passes import InsertComm
from adaptra.passes.insert_comm import LEAST_AHEAD, Channel
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import peer_stage
from adaptra.program.schedules import gpipe, one_f_one_b, zb_h1
from adaptra.program.transport_contract import Contract
from adaptra.program.verify import verify
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

TEN = CostModel.uniform(3, 10, 10, 10)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)
USES = {Kind.RECV_F: (Kind.F,), Kind.RECV_B: (Kind.I, Kind.B)}


def waiting_receives(program: Program) -> Iterator[int]:
    """Per channel, the most receives posted and not yet used by their op."""
    for order in program.orders:
        posted: dict[tuple[int, Kind], int] = {}
        most: dict[tuple[int, Kind], int] = {}
        for op in order:
            for kind, users in USES.items():
                key = (op.stage, kind)
                if op.kind is kind:
                    posted[key] = posted.get(key, 0) + 1
                    most[key] = max(most.get(key, 0), posted[key])
                elif op.kind in users and key in posted:
                    posted[key] -= 1
        yield from most.values()


def test_what_is_posted_ahead_of_need_is_told_for_any_costs() -> None:
    program, channel = gpipe(3, 12), Channel(0, 1, True)
    slow = TEN.with_latency(0, 1, 60).with_latency(1, 0, 60)
    found = [InsertComm("ahead").ahead_of_need(program, cost)[channel] for cost in (TEN, slow)]
    assert found[0] == LEAST_AHEAD < found[1]
    assert InsertComm("ahead", 2).ahead_of_need(program, slow)[channel] == 2
    assert InsertComm("late").ahead_of_need(program, slow)[channel] == 0


@settings(max_examples=100)
@given(programs(lowered=False), st.sampled_from([("late", None), ("ahead", None), ("ahead", 1), ("ahead", 3)]), st.data())
def test_any_program_gets_exactly_its_messages_in_channel_order(
    program: Program, options: tuple[str, int | None], data: st.DataObject
) -> None:
    cost = data.draw(cost_models(program.stages))
    lowered = InsertComm(*options).apply(program, cost)
    verify(lowered)  # every message once at both ends, receive order = send order on every channel, no deadlock
    assert lowered.compute_only() == program
    for order in lowered.orders:
        for before, op in pairwise(order):
            if op.kind is Kind.SEND_F:
                assert before == Op(op.stage, Kind.F, op.microbatch)
            if op.kind is Kind.SEND_B:
                assert before.stage == op.stage
                assert before.microbatch == op.microbatch
                assert before.kind in (Kind.I, Kind.B)


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4))
def test_one_stage_per_rank_posts_no_more_receives_than_asked(stages: int, microbatches: int, ahead: int) -> None:
    cost = CostModel.uniform(stages, 10, 10, 10)
    program = one_f_one_b(stages, microbatches)
    assert set(waiting_receives(InsertComm(receives="late").apply(program, cost))) <= {1}
    found = set(waiting_receives(InsertComm(ahead=ahead).apply(program, cost)))
    assert found <= {min(ahead + 1, microbatches)}


def test_a_late_receive_stands_directly_before_its_op() -> None:
    lowered = InsertComm(receives="late").apply(zb_h1(3, 6), TEN)
    for order in lowered.orders:
        for op, after in pairwise(order):
            if op.kind in RECEIVES:
                assert after == Op(op.stage, Kind.F if op.kind is Kind.RECV_F else Kind.I, op.microbatch)


def finish_with_rendezvous(program: Program, cost: CostModel) -> float:
    """When a lowered program ends if a message departs only after word of its posted receive has come: a model for this test.

    One stage per rank; a RECV is posted when its rank reaches it, compute waits for its own message, links have no occupancy.
    """
    position, now = [0] * program.ranks, [0.0] * program.ranks
    posted: dict[Op, float] = {}
    sent: dict[Op, float] = {}
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(program.orders):
            while position[rank] < len(order):
                op = order[position[rank]]
                if op.kind in RECEIVES:
                    posted[op] = now[rank]
                elif not op.kind.is_compute:
                    receive = Op(peer_stage(op), Kind.RECV_F if op.kind is Kind.SEND_F else Kind.RECV_B, op.microbatch)
                    sent[receive] = now[rank]
                else:
                    needed = {Kind.F: Kind.RECV_F, Kind.I: Kind.RECV_B}.get(op.kind)
                    receive = None if needed is None else Op(op.stage, needed, op.microbatch)
                    if receive in posted:
                        if receive not in sent:
                            break
                        edge, forward = (op.stage - 1, True) if needed is Kind.RECV_F else (op.stage, False)
                        there = (cost.latency_forward if forward else cost.latency_backward)[edge]
                        back = (cost.latency_backward if forward else cost.latency_forward)[edge]
                        now[rank] = max(now[rank], max(sent[receive], posted[receive] + back) + there)
                    now[rank] += cost.duration(op.stage, op.kind)
                position[rank] += 1
                progress = True
    assert position == [len(order) for order in program.orders]
    return max(now)


@pytest.mark.parametrize("latency", [0, 5, 20, 60, 200])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zb_h1])
def test_receives_ahead_cost_a_rendezvous_nothing_and_late_ones_a_second_latency(
    latency: float, make: Callable[[int, int], Program]
) -> None:
    cost = TEN.with_latency(1, 2, latency).with_latency(2, 1, latency)
    program = make(3, 12)
    ideal = simulate(program, cost).makespan
    late = finish_with_rendezvous(InsertComm(receives="late").apply(program, cost), cost)
    assert late >= ideal + 2 * latency
    start = 2 * latency  # the first message of each direction can't know before the step starts
    ahead = finish_with_rendezvous(InsertComm(receives="ahead").apply(program, cost), cost)
    assert ideal <= ahead <= ideal + start
    assert latency == 0 or ahead < late


def test_receives_go_as_far_ahead_as_the_latency_needs_and_no_farther() -> None:
    near = InsertComm().apply(one_f_one_b(3, 24), TEN)
    assert set(waiting_receives(near)) == {LEAST_AHEAD + 1}
    far_cost = TEN.with_latency(0, 1, 100).with_latency(1, 0, 100)
    far = InsertComm().apply(gpipe(3, 24), far_cost)
    assert max(waiting_receives(far)) > LEAST_AHEAD + 1
    assert min(waiting_receives(far)) == LEAST_AHEAD + 1


@pytest.mark.parametrize(
    ("contract", "expected"),
    [
        (Contract(send_waits_for_receiver=True, in_order=False), InsertComm(receives="ahead")),
        (Contract(send_waits_for_receiver=True, in_order=True), InsertComm(receives="late")),
        (Contract(send_waits_for_receiver=False, in_order=True), InsertComm(receives="late")),
        (Contract(send_waits_for_receiver=False, in_order=False), InsertComm(receives="late")),
    ],
)
def test_the_contract_decides(contract: Contract, expected: InsertComm) -> None:
    assert InsertComm.for_contract(contract) == expected
    ahead = 7 if expected.receives == "ahead" else None
    assert InsertComm.for_contract(contract, 7) == replace(expected, ahead=ahead)


def test_refuses_options_that_contradict() -> None:
    with pytest.raises(PassError, match=r"receives=soon: expected receives=ahead or receives=late"):
        InsertComm(receives="soon")
    with pytest.raises(PassError, match=r"ahead=2 together with receives=late: expected one of them"):
        replace(InsertComm(ahead=2), receives="late")
