"""A few bytes over every edge tell a lower rate from a longer latency where no message queues."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adaptra
from adaptra.program import Kind
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.data_parallel.accumulators import Accumulators
from adaptra.runtime.injection.faults import Fault
from adaptra.runtime.injection.faulty_transport import FaultyTransport
from adaptra.runtime.measuring.measurement import EdgeMeasurement, estimate_edge
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.step_messages.probes import Probes
from adaptra.runtime.step_messages.rate_probes import EVERY, IN_A_ROW
from adaptra.runtime.step_messages.shared_gradients import Gradients, SharedParameter
from adaptra.runtime.transports.base import ChannelClass, Identity, Pending, Purpose
from adaptra.runtime.transports.local import LocalHub, LocalTransport

STEPS = 40
"""Far more than calibration and detection take."""

SIZES = {(0, 1): 5000, (1, 0): 64}
"""Bytes of the messages between two stages."""


class IdleEdge:
    """Two stages whose messages take other routes, with a fault on what the first one sends.

    Attributes:
        told: The measurements of the edge from the first to the second stage, by step.
        sent: The rate probes that the first stage has sent.
    """

    def __init__(self, *faults: str) -> None:
        hub = LocalHub(2)
        slow = [Fault.parse(one) for one in faults]
        # Without a fault all arrives at once, however busy the machine is.
        self._transports = [FaultyTransport(one, slow) if slow else one for one in map(hub.transport, range(2))]
        self._monitors = [Monitor(rank, (0, 1)) for rank in range(2)]
        self._ends = [Probes(rank, range(2), one, self._monitors[rank], SIZES) for rank, one in enumerate(self._transports)]
        for end, one in zip(self._ends, self._transports, strict=True):
            one.reserve(Counter(end.receive_counts()) + Counter(end.receive_counts_of(())))
        self._step = 0
        self.told: list[EdgeMeasurement] = []

    def __enter__(self) -> IdleEdge:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._transports:
            one.close()

    def run(self, heard: Sequence[int] = ()) -> EdgeMeasurement | None:
        """One step; what it measured of the edge."""
        for end in self._ends:
            end.begin_step(self._step, heard)
        if heard:
            self._ends[0].answer(1)
            self._ends[1].answer(0)
        for end in self._ends:
            end.end_step(timeout=20.0)
        edges = [monitor.end_step(self._step, 0.0, 1.0).edges for monitor in self._monitors][1]
        self._step += 1
        self.told += edges
        return edges[0] if edges else None

    def run_narrow(self) -> None:
        """One step whose messages arrive a tenth of a second apart."""
        self._monitors[1].begin_step()
        for number in range(6):
            sent, arrived = 0.05 * number, 0.1 * (number + 1)
            self._monitors[1].message(Kind.SEND_F, 0, 1, number, 5000, sent, sent, arrived, arrived)
        assert self._monitors[1].end_step(self._step, 0.0, 1.0).edges[0].estimate.occupancy == pytest.approx(0.1)
        self._step += 1

    @property
    def rates(self) -> list[int]:
        """The steps that measured the rate."""
        return [step for step, one in enumerate(self.told) if one.estimate.occupancy is not None]


def test_an_idle_edge_carries_a_message_now_and_then() -> None:
    """One in eight steps. On a busy machine a link may look narrow for once, and is then asked more often."""

    def rates() -> list[int]:
        with IdleEdge() as edge:
            for _ in range(4 * EVERY):
                edge.run()
            assert all(one.messages == 0 for one in edge.told)
            return edge.rates

    assert any(rates() == [0, EVERY, 2 * EVERY, 3 * EVERY] for _ in range(5))


def test_an_edge_that_carries_messages_carries_no_rate_probe() -> None:
    with IdleEdge() as edge:
        for _ in range(2 * EVERY):
            edge.run(heard=(0, 1))
        assert edge.rates == []


@pytest.mark.timed
def test_a_rate_probe_tells_the_rate_and_no_step_waits_for_it() -> None:
    """5000 bytes at 50 kB/s take a tenth of a second. The few bytes before them are as fast as ever."""
    with IdleEdge("rate 0>1 50kB @0..1") as edge:
        while not edge.rates:
            edge.run()
        (step,) = edge.rates
        assert step > 0, "the step that asked for it has ended"
        found = edge.told[step].estimate
        assert found.occupancy is not None and found.occupancy > 0.08
        assert found.flight >= found.occupancy
        # From step 1 on the link is wide: the next rate probe is quick, and the ones after it come at once.
        while len(edge.rates) < 4:
            edge.run()
        first, *others = edge.rates[1:]
        assert others == [first + 1, first + 2]
        assert all((edge.told[one].estimate.occupancy or 0.0) < 0.05 for one in (first, *others))


def test_rate_probes_begin_with_several_in_a_row_where_the_link_is_not_as_the_last_messages_told() -> None:
    """It may have recovered while microbatches left it. Each time they leave it counts."""
    with IdleEdge() as edge:
        for _ in range(2):
            begun = len(edge.told)
            edge.run_narrow()
            while len(edge.told) < begun + IN_A_ROW + 2:
                edge.run()
            assert [step - begun for step in edge.rates if step >= begun][: IN_A_ROW + 1] == list(range(IN_A_ROW + 1))


def test_an_edge_goes_back_to_a_rate_probe_in_eight_steps() -> None:
    with IdleEdge("rate 0>1 50kB @0..1") as edge:
        while len(edge.rates) < 2 + IN_A_ROW + 3:
            edge.run()
        *_, before, last = edge.rates
        assert last - before == EVERY


def test_a_probe_splits_the_flight_of_messages_that_do_not_queue() -> None:
    apart = [(number * 0.1, number * 0.1 + 0.03) for number in range(6)]
    assert estimate_edge(apart).occupancy is None
    quick = estimate_edge(apart, probe=(0.05, 0.055))
    assert (quick.flight, quick.occupancy) == (pytest.approx(0.03), pytest.approx(0.025))
    slow = estimate_edge(apart, probe=(0.05, 0.081))
    assert (slow.flight, slow.occupancy) == (pytest.approx(0.03), 0.0)


@pytest.mark.parametrize(("sent", "occupancy"), [(0.15, 0.025), (0.11, None), (-0.01, None)])
def test_a_probe_that_left_behind_a_message_says_nothing(sent: float, occupancy: float | None) -> None:
    """Neither if that message may have waited for its receiver, as the first one here."""
    monitor = Monitor(1, (0, 1))
    monitor.begin_step()
    for number in range(6):
        at = -0.02 if number == 0 else number * 0.1
        monitor.message(Kind.SEND_F, 0, 1, number, 64, at, at, at + 0.03, at + 0.03)
    monitor.probe(0, 1, sent, sent + 0.005)
    (edge,) = monitor.end_step(0, 0.0, 1.0).edges
    assert edge.estimate.occupancy == (occupancy if occupancy is None else pytest.approx(occupancy))


def test_messages_sent_one_occupancy_apart_are_not_taken_for_queued_when_the_probe_says_otherwise() -> None:
    flights = [(start, start + 0.021 + late) for start, late in ((0.0, 0.0), (0.0155, 0.0009), (0.047, 0.0), (0.0636, 0.0))]
    assert estimate_edge(flights).occupancy == pytest.approx(0.0164, abs=1e-4)
    estimate = estimate_edge(flights, probe=(-0.0103, 0.0109))
    assert estimate.flight == pytest.approx(0.021)
    assert estimate.occupancy == pytest.approx(0.0, abs=3e-4)


class Noting(LocalTransport):
    """Notes the purposes of its messages by channel, in their order."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        super().__init__(hub, rank)
        self.sent: list[tuple[ChannelClass, Purpose]] = []
        self.posted: list[tuple[ChannelClass, Purpose]] = []

    def send(self, destination_rank: int, identity: Identity, *rest: Any, **named: Any) -> Pending:
        self.sent.append((identity.channel, identity.purpose))
        return super().send(destination_rank, identity, *rest, **named)

    def receive(self, source_rank: int, identity: Identity, into: Tensor | None = None) -> Pending:
        self.posted.append((identity.channel, identity.purpose))
        return super().receive(source_rank, identity, into)


@pytest.mark.parametrize(("owner", "order"), [(0, (1, 0)), (1, (0, 1))])
def test_a_probe_is_the_first_message_of_its_channel_also_where_a_shared_gradient_is_ready_before_it(
    owner: int, order: tuple[int, int]
) -> None:
    """Where another replica's worker computes the first microbatches, a rank hears from its neighbour late."""
    hub = LocalHub(2)
    transports = [Noting(hub, rank) for rank in range(2)]
    tied = SharedParameter("tied", (0, 1), owner, order)
    ends = [Probes(rank, range(2), one, Monitor(rank, (0, 1)), SIZES) for rank, one in enumerate(transports)]
    gradients = [
        Gradients(rank, Accumulators({"tied": nn.Parameter(torch.zeros(1))}), [tied], range(2), one, 5.0, ends[rank].answer)
        for rank, one in enumerate(transports)
    ]
    for rank, one in enumerate(transports):
        one.reserve(Counter(ends[rank].receive_counts()) + Counter(gradients[rank].receive_counts()))
        ends[rank].begin_step(0, (1 - rank,))
        gradients[rank].begin_step(0)
    for rank in (1 - owner, owner):
        gradients[rank].add(rank, "tied", 0, torch.ones(1))
        gradients[rank].end_microbatch(rank, 0)
    ends[0].answer(1)
    ends[1].answer(0)
    for rank in (owner, 1 - owner):
        gradients[rank].end_step()
        ends[rank].end_step(timeout=5.0)
    for rank in range(2):
        assert transports[rank].sent == transports[1 - rank].posted
        assert transports[rank].sent[0][1] is Purpose.PROBE


@pytest.mark.parametrize("in_order", [False, True])
def test_there_are_no_probes_where_ranks_have_one_queue_for_everything(in_order: bool) -> None:
    hub = LocalHub(2)
    transports = [hub.transport(rank) for rank in range(2)]
    monitors = [Monitor(rank, (0, 1)) for rank in range(2)]
    for transport in transports:
        transport.contract = replace(transport.contract, in_order=in_order)
    ends = [Probes(rank, range(2), transport, monitors[rank], SIZES) for rank, transport in enumerate(transports)]
    for end, transport in zip(ends, transports, strict=True):
        transport.reserve(end.receive_counts())
        end.begin_step(0)
    ends[0].answer(1)
    ends[1].answer(0)
    for end in ends:
        end.end_step(timeout=5.0)
    assert [len(end.receive_counts()) for end in ends] == ([0, 0] if in_order else [1, 1])


@pytest.mark.timed
@pytest.mark.parametrize(("fault", "is_occupancy"), [("rate 2>1 3kB @8", True), ("delay 2>1 21ms @8", False)])
def test_gradients_that_come_slowly_are_told_from_gradients_that_come_late(fault: str, is_occupancy: bool) -> None:
    """A message of 64 bytes at 3 kB/s occupies its edge for 21 ms."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    inputs = torch.randn(16, 8)
    problem: dict[str, Any] = {
        "example_inputs": (inputs, torch.zeros_like(inputs)),
        "loss": nn.functional.mse_loss,
        "split": ["1", "2"],
    }
    told: list[ControlEvent] = []
    device = adaptra.EmulatedDevice(0.005, 0.005, 0.005)
    options = adaptra.Options(adapt=False, schedule="1f1b", emulate=device, faults=[fault], on_event=told.append)
    shares: list[float] = []
    with adaptra.compile(model, stages=3, microbatches=8, options=options, **problem) as pipe:
        for _ in range(STEPS):
            pipe.step(inputs, torch.zeros_like(inputs))
            shares = occupied_shares(told, "2→1")
            # Ops that a busy machine slows down send too seldom for messages to queue. Then a later step tells.
            if any(share > 0.5 for share in shares):
                break
    assert shares, "nothing was detected"
    assert any(share > 0.5 for share in shares) == is_occupancy


def occupied_shares(told: list[ControlEvent], edge: str) -> list[float]:
    """The part of an edge's flight that is occupancy, each time that the edge was told to be slow."""
    texts = (event.text for event in told if event.kind is EventKind.DETECTED)
    pattern = rf"edge {edge} slow: ([\d.]+) ms \(was [\d.]+ ms\)(?:, ([\d.]+) ms of it occupancy)?"
    return [float(occupied or 0) / float(flight) for text in texts for flight, occupied in re.findall(pattern, text)]
