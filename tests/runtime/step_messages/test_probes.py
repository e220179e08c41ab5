"""A few bytes over every edge tell a lower rate from a longer latency where no message queues."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import adaptra
from adaptra.program import Kind
from adaptra.runtime.control.events import ControlEvent, EventKind
from adaptra.runtime.detection.measurement import estimate_edge
from adaptra.runtime.detection.monitor import Monitor
from adaptra.runtime.step_messages.probes import Probes
from adaptra.runtime.transports.local import LocalHub

STEPS = 40
"""Far more than calibration and detection take."""


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


@pytest.mark.parametrize("in_order", [False, True])
def test_there_are_no_probes_where_ranks_have_one_queue_for_everything(in_order: bool) -> None:
    hub = LocalHub(2)
    transports = [hub.transport(rank) for rank in range(2)]
    monitors = [Monitor(rank, (0, 1)) for rank in range(2)]
    for transport in transports:
        transport.contract = replace(transport.contract, in_order=in_order)
    ends = [Probes(rank, range(2), transport, monitors[rank]) for rank, transport in enumerate(transports)]
    for end, transport in zip(ends, transports, strict=True):
        transport.reserve(end.receive_counts())
        end.begin_step(0)
    ends[0].answer(1)
    ends[1].answer(0)
    for end in ends:
        end.end_step(timeout=5.0)
    assert [len(end.receive_counts()) for end in ends] == ([0, 0] if in_order else [1, 1])


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
    with adaptra.compile(model, stages=3, microbatches=8, options=options, **problem) as pipe:
        for _ in range(STEPS):
            pipe.step(inputs, torch.zeros_like(inputs))
            if any(event.kind is EventKind.DETECTED and "edge 2→1 slow" in event.text for event in told):
                break
    (text,) = (event.text for event in told if event.kind is EventKind.DETECTED and "edge 2→1 slow" in event.text)
    found = re.search(r"edge 2→1 slow: ([\d.]+) ms \(was [\d.]+ ms\)(?:, ([\d.]+) ms of it occupancy)?", text)
    assert found is not None
    assert (float(found[2] or 0) > 0.5 * float(found[1])) == is_occupancy
