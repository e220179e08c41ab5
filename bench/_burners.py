"""Processes that burn a processor beside steps of real work, and the slowness of these steps as the detector sees it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from adaptra.runtime.detection.changes import StageChange
from adaptra.runtime.detection.detector import Detection, Detector
from adaptra.runtime.detection.pressure import read_machine
from adaptra.runtime.measuring.measurement import StageMeasurement, StepMeasurement
from adaptra.simulation.cost import CostModel

WORK = 0.03
"""Processor seconds of a step."""
CALIBRATING = 12
"""Steps without a burner, until the detector knows what is usual."""
READ = ("cpu some", "io some", "memory some", "bytes/s")
"""The figures of a step. What the kernel does not have counts as 0 in all of them."""


@dataclass(frozen=True, slots=True)
class SeenStep:
    """A step: its seconds, whether the detector takes its worker for slow after it, and what the kernel said of it."""

    seconds: float
    is_slow: bool
    figures: tuple[float, ...]


def work(amount: int) -> int:
    """Keep a processor busy."""
    total = 0
    for number in range(amount):
        total += number & 7
    return total


def amount_of_a_step() -> int:
    """Return the work that takes a step's processor seconds."""
    started = time.process_time()
    work(2_000_000)
    return int(2_000_000 * WORK / (time.process_time() - started))


class SlownessSeen:
    """The detector, and whether the one stage that it watches is slow now."""

    def __init__(self) -> None:
        self._detector = Detector(CostModel.uniform(1, WORK / 3, WORK / 3, WORK / 3))
        self.is_slow = False

    def step(self, number: int, seconds: float) -> bool:
        """Take a step's time, and return whether the stage is slow."""
        stage = StageMeasurement(0, seconds / 3, seconds / 3, seconds / 3, None)
        found: Detection | None = self._detector.observe([StepMeasurement(0, number, seconds, (stage,), ())])
        for change in () if found is None else found.changes:
            if isinstance(change, StageChange):
                self.is_slow = not change.is_healed and change.now > change.calibrated
        return self.is_slow


def burned_steps(spells: int, length: Callable[[], int], gap: Callable[[], int]) -> Iterator[SeenStep]:
    """Yield steps while burners come and go on the processor of this process.

    Args:
        spells: The number of times that a burner comes.
        length: Draws for how many steps it stays.
        gap: Draws the steps until the next one.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        amount, seen, number, last = amount_of_a_step(), SlownessSeen(), 0, read_machine()
        for spell in range(-1, spells):
            waits, burns = (CALIBRATING, 0) if spell < 0 else (gap(), length())
            for steps, is_burning in ((waits, False), (burns, True)):
                burner = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_burning else None
                try:
                    for _ in range(steps):
                        started = time.perf_counter()
                        work(amount)
                        seconds, now = time.perf_counter() - started, read_machine()
                        figures, last, number = now.since(last), now, number + 1
                        is_slow = seen.step(number, seconds)
                        yield SeenStep(seconds, is_slow, tuple(figures.get(name, 0.0) for name in READ))
                finally:
                    if burner is not None:
                        burner.kill()
                        burner.wait()
    finally:
        os.sched_setaffinity(0, before)
