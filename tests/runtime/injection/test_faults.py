"""Faults: their text, what they do to messages on a link, and to stages and workers."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence

import pytest
from errors_table import check_documented
from hypothesis import given
from hypothesis import strategies as st
from transport_bodies import LARGE, SMALL, backward, bulk, forward, make

from adaptra.errors import CaseError, TransportError
from adaptra.program import Kind, Op
from adaptra.runtime.injection.faults import (
    FAILURES,
    Effect,
    Fault,
    compute_extra,
    compute_factor,
    faults_of_worker,
    link_delay,
    link_occupancy,
)
from adaptra.runtime.injection.faulty_transport import FaultyTransport
from adaptra.runtime.injection.points import Moment, Point
from adaptra.runtime.transports.base import Identity
from adaptra.runtime.transports.local import LocalHub

# Generous for a busy machine, and far from what the fault under test would add.


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("delay 1-2 60ms @8", Fault(Effect.DELAY, 0.06, 1, 2, both_ways=True, from_step=8)),
        ("delay 1>2 60ms @8..20", Fault(Effect.DELAY, 0.06, 1, 2, from_step=8, until_step=20)),
        ("delay 2>1 250us", Fault(Effect.DELAY, 0.00025, 2, 1)),
        ("rate 1>2 50MB @8", Fault(Effect.RATE, 50e6, 1, 2, from_step=8)),
        ("rate 0-1 1.5GB", Fault(Effect.RATE, 1.5e9, 0, 1, both_ways=True)),
        ("lossy 1-2 5% 60ms @8", Fault(Effect.LOSS, 0.06, 1, 2, both_ways=True, from_step=8, share=0.05)),
        ("lossy 2>1 0.7% 1.5s", Fault(Effect.LOSS, 1.5, 2, 1, share=0.007)),
        ("slow 2 1.5x @8", Fault(Effect.FACTOR, 1.5, 2, from_step=8)),
        ("slow 2 5ms", Fault(Effect.EXTRA, 0.005, 2)),
        ("delay 1-2@replica0 60ms @8", Fault(Effect.DELAY, 0.06, 1, 2, both_ways=True, from_step=8, replica=0)),
        ("rate 1>2@replica12 50MB", Fault(Effect.RATE, 50e6, 1, 2, replica=12)),
        ("rate 1-2 /6 @8..20", Fault(Effect.DIVISOR, 6, 1, 2, both_ways=True, from_step=8, until_step=20)),
        ("rate 1>2@replica0 /1.5", Fault(Effect.DIVISOR, 1.5, 1, 2, replica=0)),
        ("lossy 1>2@replica1 5% 60ms", Fault(Effect.LOSS, 0.06, 1, 2, share=0.05, replica=1)),
        ("slow 1.2 2x @8", Fault(Effect.FACTOR, 2, 2, from_step=8, replica=1)),
        ("slow 0.2 5ms", Fault(Effect.EXTRA, 0.005, 2, replica=0)),
        ("freeze 1.2 @8 5s", Fault(Effect.FREEZE, 5, 2, from_step=8, replica=1)),
        ("freeze 2 @0 1.5ms", Fault(Effect.FREEZE, 0.0015, 2)),
        ("cut 1.2 @8:REDUCE 3s", Fault(Effect.CUT, 3, 2, from_step=8, replica=1, point=Moment.REDUCE)),
        ("break 1.2 @8", Fault(Effect.BREAK, 0, 2, from_step=8, replica=1)),
        ("kill 1.2 @8:2W3", Fault(Effect.KILL, 0, 2, from_step=8, replica=1, point=Op(2, Kind.W, 3))),
        ("kill 2 @0:REDUCE", Fault(Effect.KILL, 0, 2, point=Moment.REDUCE)),
        ("break 0.1 @8:certificate", Fault(Effect.BREAK, 0, 1, from_step=8, replica=0, point=Moment.CERTIFICATE)),
        ("freeze 1.2 @8:optimizer 5s", Fault(Effect.FREEZE, 5, 2, from_step=8, replica=1, point=Moment.OPTIMIZER)),
        ("freeze 1.2 @8:clip 5s", Fault(Effect.FREEZE, 5, 2, from_step=8, replica=1, point=Moment.CLIP)),
    ],
)
def test_text_form(text: str, fault: Fault) -> None:
    assert Fault.parse(text) == fault
    assert str(fault) == text


AMOUNTS = st.floats(1e-9, 1e12, allow_nan=False)


@given(
    effect=st.sampled_from(Effect),
    amount=AMOUNTS,
    stage=st.integers(0, 9),
    away=st.integers(1, 9),
    both_ways=st.booleans(),
    first=st.integers(0, 99),
    steps=st.none() | st.integers(1, 99),
    share=st.floats(1e-9, 1.0),
    replica=st.none() | st.integers(0, 99),
    point=st.sampled_from(Moment) | st.builds(Op, st.integers(0, 9), st.sampled_from("FIWB").map(Kind), st.integers(0, 99)),
)
def test_text_form_round_trips(
    effect: Effect,
    amount: float,
    stage: int,
    away: int,
    both_ways: bool,
    first: int,
    steps: int | None,
    share: float,
    replica: int | None,
    point: Point,
) -> None:
    is_edge = effect in {Effect.DELAY, Effect.RATE, Effect.DIVISOR, Effect.LOSS}
    fails = effect in FAILURES
    fault = Fault(
        effect,
        amount + 1 if effect in {Effect.FACTOR, Effect.DIVISOR} else 0 if effect in {Effect.BREAK, Effect.KILL} else amount,
        stage,
        stage + away if is_edge else None,
        both_ways and is_edge,
        first,
        None if steps is None or fails else first + steps,
        share if effect is Effect.LOSS else 1.0,
        replica,
        point if fails else Moment.BEGIN,
    )
    assert Fault.parse(str(fault)) == fault


@pytest.mark.parametrize(
    "text",
    [
        "",
        "delay 1-2 60",
        "delay 1-2 60ms@8",
        "delay 1-2 60ms @8 ",
        "delay 1-2 60ms @8..",
        "delay 1-2 -60ms",
        "delay 1-2 60ms @-8",
        "delay 01-2 60ms",
        "delay 1→2 60ms",
        "delay 1-2 6e1ms",
        "delay 1-1 60ms",
        "rate 1>2 50MB/s",
        "rate 1>2 0MB",
        "rate 1>2 60ms",
        "lossy 1-2 200ms",
        "lossy 1-2 5 200ms",
        "lossy 1-2 5% 20MB",
        "lossy 1-2 0% 200ms",
        "lossy 1-2 101% 200ms",
        "lossy 1 5% 200ms",
        "slow 2 50MB",
        "slow 2-3 1.5x",
        "slow 2 0.5x",
        "delay 1-2 60ms @8..8",
        "delay 0.1-0.2 60ms",
        "delay 1-2@0 60ms",
        "delay 1-2@replica 60ms",
        "delay 1-2@replica-1 60ms",
        "delay 1-2 @replica1 60ms",
        "rate 1-2 /0.5",
        "rate 1-2 /6MB",
        "rate 1-2 6",
        "slow 2@replica1 2x",
        "slow 1.2.3 2x",
        "slow 1. 2x",
        "slow .2 2x",
        "slow 1.02 2x",
        "slow 1.2 /2",
        "slow 1.1234567890 2x",
        "freeze 1.2 5s",
        "freeze 1.2 5s @8",
        "freeze 1.2 @8",
        "freeze 1.2 @8..9 5s",
        "freeze 1.2 @8 5x",
        "freeze 1-2 @8 5s",
        "cut 1.2 @8",
        "cut 1.2 3s",
        "cut 1-2 @8 3s",
        "kill 1.2",
        "kill 1.2 @8 5s",
        "kill 1-2 @8",
        "kill 1.2@replica1 @8",
        "break 1.2 @8..9",
        "break 1.2 @8: 2W3",
        "break 1.2 @8:",
        "break 1.2 @8:begin",
        "break 1.2 @8:reduce",
        "break 1.2 @8:2STEP",
        "break 1.2 @8:1:2W3",
        "break 1.2 @8:2W",
        "break 1.2 @8:2SEND_F3",
        "break 1.2 @8:2F3@delegate",
        "slow 1.2 2x @8:2W3",
        "delay 1-2 60ms; rate 1>2 5MB",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(CaseError, match="fault"):
        Fault.parse(text)


def test_a_refusal_shows_the_text_and_the_forms() -> None:
    with pytest.raises(CaseError, match=r"fault 'delay 1-2 soon': expected such as 'delay 1-2 60ms @8'"):
        Fault.parse("delay 1-2 soon")


def test_only_a_lossy_edge_has_a_share() -> None:
    with pytest.raises(CaseError, match=r"fault delay 50%: expected above 0% and at most 100%, and of a lossy edge alone"):
        Fault(Effect.DELAY, 0.06, 1, 2, share=0.5)


def test_a_worker_fails_once() -> None:
    with pytest.raises(CaseError, match=r"fault freeze @8\.\.9: expected one step, as a worker fails once"):
        Fault(Effect.FREEZE, 5.0, 2, from_step=8, until_step=9)


@pytest.mark.parametrize("text", ["break 1 @8:REDUCE", "kill 1 @8:certificate"])
def test_a_function_without_a_loss_has_no_sum_and_no_certificate_in_its_step(text: str) -> None:
    Fault.parse(text).check_point([0, 1], 4, with_loss=True)
    with pytest.raises(CaseError) as refused:
        Fault.parse(text).check_point([0, 1], 4, with_loss=False)
    row = "fault '…': the function returns no loss: expected another point than …"
    check_documented("CaseError", str(refused.value), row)


@pytest.mark.parametrize("text", ["slow 1.0 2x", "freeze 1.0 @8 5s", "delay 0-1@replica1 5ms", "rate 0>1@replica1 /2"])
def test_a_fault_of_a_replica_that_does_not_exist_is_refused(text: str) -> None:
    Fault.parse(text).check_replica(2)
    with pytest.raises(CaseError, match=re.escape(f"fault '{text}': there is no replica 1: expected replicas of 0..0")):
        Fault.parse(text).check_replica(1)


def test_a_fault_of_all_replicas_fits_any_job() -> None:
    Fault.parse("slow 1 2x").check_replica(1)
    Fault.parse("delay 0-1 5ms").check_replica(1)


@pytest.mark.parametrize(
    ("divisor", "rates"),
    [
        ("rate 1-2 /6 @8", ["rate 1-2 50MB"]),
        ("rate 1-2@replica0 /6 @8", ["rate 1-2 50MB"]),
        ("rate 1-2@replica0 /6 @8", ["rate 1-2@replica0 50MB @8"]),
        ("rate 1-2 /6 @8", ["rate 1>2 50MB", "rate 2>1 5MB"]),
        ("rate 1>2 /6", ["rate 2-1 50MB"]),
        ("rate 1-2 /6 @8..20", ["rate 1-2 50MB @4..20"]),
        ("rate 1-2 /6 @8", ["rate 1-2 50MB @8..12", "rate 1-2 20MB @12"]),
    ],
)
def test_a_divisor_with_a_rate_at_all_its_steps_is_taken(divisor: str, rates: Sequence[str]) -> None:
    faults = [Fault.parse(text) for text in (divisor, *rates)]
    for fault in faults:
        fault.check_base(faults)


@pytest.mark.parametrize(
    ("divisor", "rates", "edge", "step", "shown"),
    [
        ("rate 1-2 /6 @8", [], "1→2", 8, "rate 1-2 50MB @8"),
        ("rate 1-2 /6 @8", ["rate 1-2 /2", "delay 1-2 5ms"], "1→2", 8, "rate 1-2 50MB @8"),
        ("rate 1-2@replica0 /6", ["rate 1-2@replica1 5MB"], "1→2", 0, "rate 1-2@replica0 50MB"),
        ("rate 1-2 /6", ["rate 1-2@replica0 5MB"], "1→2", 0, "rate 1-2 50MB"),
        ("rate 1-2 /6", ["rate 1>2 5MB"], "2→1", 0, "rate 1-2 50MB"),
        ("rate 2>1 /6", ["rate 1>2 5MB"], "2→1", 0, "rate 2>1 50MB"),
        ("rate 1-2 /6 @8", ["rate 1-2 50MB @9"], "1→2", 8, "rate 1-2 50MB @8"),
        ("rate 1-2 /6 @8", ["rate 1-2 50MB @8..12"], "1→2", 12, "rate 1-2 50MB @8"),
        ("rate 1-2 /6 @8..20", ["rate 1-2 50MB @8..12", "rate 1-2 20MB @13"], "1→2", 12, "rate 1-2 50MB @8..20"),
    ],
)
def test_a_divisor_without_a_rate_to_divide_is_refused(
    divisor: str, rates: Sequence[str], edge: str, step: int, shown: str
) -> None:
    """The rate that the refusal shows would do."""
    faults = [Fault.parse(text) for text in (divisor, *rates)]
    told = f"fault '{divisor}': edge {edge} has no rate to divide in step {step}: expected another fault such as '{shown}'"
    with pytest.raises(CaseError, match=f"^{re.escape(told)}$"):
        faults[0].check_base(faults)
    faults[0].check_base([*faults, Fault.parse(shown)])


def test_the_lowest_rate_is_divided_and_divisors_multiply() -> None:
    faults = [Fault.parse(text) for text in ("rate 0>1 500kB", "rate 0>1 1MB", "rate 0>1 /2 @3", "rate 0-1 /3 @5")]
    message = 20_000 / 500_000  # bytes by bytes a second
    assert [link_occupancy(faults, forward(0, step=step, specs=LARGE)) for step in (2, 3, 5)] == pytest.approx(
        [message, 2 * message, 6 * message]
    )
    assert link_occupancy(faults[-1:], backward(0, step=5)) == 0


def test_a_worker_gets_its_own_faults_and_those_of_all_replicas() -> None:
    texts = ["slow 1 2x", "slow 1.1 3x", "slow 0.1 4x", "slow 1.0 5x", "freeze 1.1 @8 5s", "kill 1 @9", "freeze 0 @8 9s"]
    texts += ["delay 0-1 5ms", "delay 0-1@replica1 6ms", "delay 0-1@replica0 7ms"]
    mine = tuple(faults_of_worker(map(Fault.parse, texts), 1, [1]))
    assert [compute_factor(mine, stage, 0) for stage in (0, 1)] == [1, 6]
    assert [str(one) for one in mine if one.effect in FAILURES] == ["freeze 1.1 @8 5s", "kill 1 @9"]
    assert link_delay(mine, forward(0)) == pytest.approx(0.011)


def test_a_slow_worker_is_slow_at_all_its_stages_and_a_slow_stage_alone() -> None:
    """A worker with several stages may be named by any of them. It fails as a whole, once."""
    faults = tuple(map(Fault.parse, ("slow 1.3 2x", "slow 1.0 5ms", "slow 3 3x", "freeze 1.3 @8 5s")))
    mine = tuple(faults_of_worker(faults, 1, [0, 3]))
    assert [compute_factor(mine, stage, 8) for stage in (0, 3)] == [2, 6]
    assert [compute_extra(mine, stage, 8) for stage in (0, 3)] == [0.005, 0.005]
    assert [str(one) for one in mine if one.effect in FAILURES] == ["freeze 1.3 @8 5s"]
    other = tuple(faults_of_worker(faults, 0, [0, 3]))
    assert [compute_factor(other, stage, 8) for stage in (0, 3)] == [1, 3]


def test_which_messages_are_lost_is_the_same_in_every_run_and_as_many_as_ordered() -> None:
    faults = [Fault.parse("lossy 0>1 5% 200ms @3")]
    delays = [link_delay(faults, forward(k, step=step)) for step in range(3, 203) for k in range(10)]
    assert delays == [link_delay(faults, forward(k, step=step)) for step in range(3, 203) for k in range(10)]
    assert set(delays) == {0, 0.2}
    assert 60 < delays.count(0.2) < 140
    assert [link_delay(faults, forward(k, step=2)) for k in range(100)] == [0] * 100
    assert [link_delay(faults, backward(k, step=3)) for k in range(100)] == [0] * 100


def test_what_is_sent_behind_a_lost_message_arrives_behind_it() -> None:
    """The channel stays in order, as TCP's does; before the lost one all are as fast as ever."""
    faults = [Fault.parse("lossy 0>1 25% 1s")]
    lost = {step: [k for k in range(8) if link_delay(faults, forward(k, step=step))] for step in range(20)}
    step, first = next((step, ks[0]) for step, ks in lost.items() if ks and 0 < ks[0] < 6)
    with Pair("lossy 0>1 25% 1s") as pair:
        latencies = pair.latencies([forward(k, step=step) for k in range(8)])
    assert max(latencies[:first]) < 0.9
    assert min(latencies[first:]) >= 0.9


def test_slow_stages() -> None:
    faults = [Fault.parse(text) for text in ("slow 2 1.5x @8", "slow 2 2x @10..12", "slow 1 5ms", "slow 1 1ms", "delay 1-2 1s")]
    assert [compute_factor(faults, 2, step) for step in (7, 8, 10, 11, 12)] == [1.0, 1.5, 3.0, 3.0, 1.5]
    assert compute_factor(faults, 1, 9) == 1.0
    assert compute_extra(faults, 1, 0) == pytest.approx(0.006)
    assert compute_extra(faults, 2, 9) == 0


class Pair:
    """Two ranks with a stage each, and faults on what rank 0 and rank 1 send."""

    def __init__(self, *texts: str) -> None:
        hub = LocalHub(2)
        faults = [Fault.parse(text) for text in texts]
        self.ends = [FaultyTransport(hub.transport(rank), faults) for rank in range(2)]
        for rank, end in enumerate(self.ends):
            end.reserve({(1 - rank, SMALL): 50, (1 - rank, LARGE): 50})

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.close()

    def latencies(self, identities: Sequence[Identity], sender: int = 0) -> list[float]:
        """How long each message took, all posted at once and in this order."""
        for identity in identities:
            self.ends[sender].send(1 - sender, identity, make(identity))
        pending = [self.ends[1 - sender].receive(sender, identity) for identity in identities]
        for each in pending:
            each.wait(100)
        return [each.arrived_at - each.sent_at for each in pending]


def test_delayed_messages_travel_side_by_side() -> None:
    """Each takes the delay, however many there are: one after the other they would take ten seconds."""
    with Pair("delay 0>1 1s") as pair:
        latencies = pair.latencies([forward(k) for k in range(10)])
        assert min(latencies) >= 1
        assert max(latencies) < 8


def test_messages_queue_for_a_rate() -> None:
    """The k-th message waits for the k before it to leave."""
    with Pair("rate 0>1 500kB", "delay 0>1 50ms") as pair:
        latencies = pair.latencies([forward(k, specs=LARGE) for k in range(4)])
        for k, latency in enumerate(latencies):
            assert latency > 0.04 + 0.04 * (k + 1)


def test_only_the_named_direction_and_steps_are_affected() -> None:
    with Pair("delay 0>1 1s @3..5") as pair:
        assert max(pair.latencies([forward(0, step=2)])) < 0.9
        assert min(pair.latencies([forward(0, step=3)])) >= 1
        assert max(pair.latencies([backward(0, step=3)], sender=1)) < 0.9
        assert min(pair.latencies([forward(0, step=4)])) >= 1
        assert max(pair.latencies([forward(0, step=5)])) < 0.9
        # Stages 3 and 4 lie on the same ranks, but not on this edge.
        assert max(pair.latencies([forward(0, 3, 4, step=4)])) < 0.9


def test_both_directions() -> None:
    with Pair("delay 0-1 150ms") as pair:
        assert min(pair.latencies([forward(0)])) >= 0.15
        assert min(pair.latencies([backward(0)], sender=1)) >= 0.15


def test_a_channel_stays_in_order_when_a_fault_ends() -> None:
    """What is sent after the last slow step does not overtake what is still held."""
    with Pair("delay 0>1 1s @0..1") as pair:
        held, later, other = forward(0, step=0), forward(0, step=1), backward(0, 0, 1, step=1)
        bulky = bulk(0, specs=SMALL, step=2)
        sends = [pair.ends[0].send(1, identity, make(identity)) for identity in (held, later, other, bulky)]
        received = [pair.ends[1].receive(0, identity) for identity in (held, later, other, bulky)]
        for pending in received:
            pending.wait(100)
        assert received[0].arrived_at <= received[1].arrived_at
        # The other channels are free.
        assert received[2].arrived_at < received[0].arrived_at
        assert received[3].arrived_at < received[0].arrived_at
        assert all(pending.wait(100) == () and pending.done for pending in sends)


def test_closing_sends_what_is_held_and_an_abort_drops_it() -> None:
    hub = LocalHub(2)
    faults = [Fault.parse("delay 0>1 100ms")]
    receiver = hub.transport(1)
    receiver.reserve({(0, SMALL): 2})
    closed = FaultyTransport(hub.transport(0), faults)
    pending = closed.send(1, forward(0), make(forward(0)))
    assert not pending.done
    with pytest.raises(TransportError, match=r"0SEND_F0 .*held by a fault for more than 0.001 s"):
        pending.wait(0.001)
    closed.close()
    assert receiver.receive(0, forward(0)).done

    aborted = FaultyTransport(hub.transport(0), faults)
    pending = aborted.send(1, forward(1), make(forward(1)))
    reason = RuntimeError("the reason")
    aborted.abort(reason)
    with pytest.raises(RuntimeError, match="the reason"):
        pending.wait(100)
    with pytest.raises(RuntimeError, match="the reason"):
        aborted.send(1, forward(2), make(forward(2)))
    aborted.close()
    assert not receiver.receive(0, forward(1)).done
    assert not [thread.name for thread in threading.enumerate() if thread.name.endswith("faults")]


def test_a_cut_holds_what_leaves_and_what_comes_and_then_lets_it_go_in_order() -> None:
    """What had come before is not held. Messages between other ranks go on."""
    with Pair("cut 1 @8 5s") as pair:
        free, cut = pair.ends
        free.send(1, forward(0), make(forward(0)))
        before, later = cut.receive(0, forward(0)), cut.receive(0, forward(1))
        begun = time.monotonic()
        cut.cut(0.3)
        assert before.done and before.wait(100)
        free.send(1, forward(1), make(forward(1)))
        sent = [cut.send(0, backward(number), make(backward(number))) for number in range(2)]
        come = [free.receive(1, backward(number)) for number in range(2)]
        assert not any(one.done for one in (later, *sent, *come))
        with pytest.raises(TransportError, match=r"0SEND_F1 .*held by a fault that cuts rank 1 off"):
            later.wait(0.001)
        assert later.wait(100) and later.arrived_at >= begun + 0.3 and before.arrived_at < begun
        assert [one.wait(100) for one in come] and time.monotonic() >= begun + 0.3
        assert [one.arrived_at >= begun + 0.3 for one in come] == [True, True]
        cut.release(later)


def test_an_abort_ends_a_wait_for_a_cut() -> None:
    with Pair("cut 1 @8 5s") as pair:
        free, cut = pair.ends
        cut.cut(100)
        free.send(1, forward(0), make(forward(0)))
        receive = cut.receive(0, forward(0))
        threading.Timer(0.05, cut.abort, [RuntimeError("the reason")]).start()
        with pytest.raises(RuntimeError, match="the reason"):
            receive.wait(100)


def test_an_error_of_a_held_send_reaches_its_waiter() -> None:
    with Pair("delay 0>1 20ms") as pair:
        pending = pair.ends[0].send(1, forward(0), make(forward(1, specs=LARGE)))
        with pytest.raises(TransportError, match=r"send of 0SEND_F0 .*got float32\[5000\]"):
            pending.wait(100)
