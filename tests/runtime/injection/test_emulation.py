"""Emulated devices: stated durations in the cost model, and ops that last as long."""

from __future__ import annotations

import pytest

from adaptra.errors import OptionError
from adaptra.program import Kind
from adaptra.runtime.injection import emulation
from adaptra.runtime.injection.emulation import EmulatedDevice, Pacing
from adaptra.runtime.injection.faults import Fault
from adaptra.simulation.cost import CostModel

COST = CostModel.uniform(3, 1.0, 2.0, 3.0, latency=0.5)


class Clock:
    """Stands for the module time: seconds pass only in a sleep."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(emulation, "time", made)
    return made


def lasting(clock: Clock, pacing: Pacing, stage: int, kind: Kind, step: int = 0, took: float = 0.0) -> float:
    """How long an op lasts that itself took so long."""
    started = clock.monotonic() - took
    pacing.pad(stage, kind, step, started)
    return clock.monotonic() - started


def test_durations_are_those_of_the_device_and_all_else_stays() -> None:
    cost = EmulatedDevice(0.1, [0.2, 0.3, 0.4], (1, 2, 3)).apply(COST)
    assert cost.forward == (0.1, 0.1, 0.1)
    assert cost.input_grad == (0.2, 0.3, 0.4)
    assert cost.weight_grad == (1.0, 2.0, 3.0)
    assert cost.latency_forward == COST.latency_forward and cost.memory_forward == COST.memory_forward


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (EmulatedDevice(0.1, [0.2, 0.3], 0.1), r"input_grad has 2 durations: expected one number for all stages or 3"),
        (EmulatedDevice(0.1, 0.1, -1), r"weight_grad=-1: expected seconds"),
        (EmulatedDevice(True, 0.1, 0.1), r"forward=True: expected seconds"),
        (EmulatedDevice(0.1, 0.1, [0.1, float("inf"), 0.1]), r"weight_grad=\[0.1, inf, 0.1\]: expected seconds"),
    ],
)
def test_what_is_no_duration_is_refused(device: EmulatedDevice, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        device.apply(COST)


def test_an_op_is_padded_to_its_duration(clock: Clock) -> None:
    pacing = Pacing(EmulatedDevice([0.02, 0.05, 0.02], 0.03, 0.04).apply(COST), ())
    for stage, kind, seconds in ((0, Kind.F, 0.02), (1, Kind.F, 0.05), (2, Kind.I, 0.03), (0, Kind.W, 0.04), (0, Kind.B, 0.07)):
        assert lasting(clock, pacing, stage, kind, took=0.01) == pytest.approx(seconds)


def test_an_op_that_took_longer_is_not_padded(clock: Clock) -> None:
    assert lasting(clock, Pacing(EmulatedDevice(0.5, 0.5, 0.5).apply(COST), ()), 0, Kind.F, took=1.0) == pytest.approx(1.0)


def test_a_slow_stage_takes_longer_from_its_step_on(clock: Clock) -> None:
    pacing = Pacing(EmulatedDevice(0.02, 0.02, 0.02).apply(COST), [Fault.parse("slow 1 3x @4"), Fault.parse("slow 1 40ms @6")])
    assert lasting(clock, pacing, 0, Kind.F, step=7) == pytest.approx(0.02)
    assert lasting(clock, pacing, 1, Kind.F, step=3) == pytest.approx(0.02)
    assert lasting(clock, pacing, 1, Kind.F, step=4) == pytest.approx(0.06)
    assert lasting(clock, pacing, 1, Kind.F, step=7) == pytest.approx(0.1)


def test_without_a_device_and_faults_nothing_waits(clock: Clock) -> None:
    assert lasting(clock, Pacing(None, ()), 0, Kind.F) == 0


def test_a_slow_stage_without_a_device_stretches_what_the_op_took(clock: Clock) -> None:
    assert lasting(clock, Pacing(None, [Fault.parse("slow 0 4x")]), 0, Kind.F, took=0.02) == pytest.approx(0.08)
