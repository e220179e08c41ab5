"""The simulated clock against processes: exact steps with shares while one replica is slow.

Ops are padded, so that all processes fit this machine. The messages, the switch to shares and the sums are real. The clock is
told what one healthy step takes, and which replica is how slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from statistics import median
from typing import Any

from _ranks import run_on_ranks, small_problem, timed_in_a_row
from _table import Row
from rich.progress import Progress

import adaptra
from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.clock import draw_times, updates_of
from adaptra.planning.synchrony.modes import Synchronous
from adaptra.runtime.control.plans.events import ControlEvent, EventKind

SETTINGS = ((2, 1, 1.5), (2, 1, 2.0), (2, 1, 3.0), (3, 1, 1.5), (3, 1, 2.0), (2, 2, 2.0))
"""Replicas, stages, and the factor of the slow replica."""
MICROBATCHES, HEALTHY, SWITCHING, COUNTED = 16, 8, 7, 9
"""Microbatches of a replica; steps before the onset, steps in which the job may switch, and steps that are counted."""
SKIPPED = 3
"""Steps at the beginning that are not counted as healthy."""


def measure(rank: int, stages: int, factor: float, op: float) -> dict[str, Any]:
    """One rank: seconds of each step, and how often microbatches were shared."""
    told: list[ControlEvent] = []
    options = adaptra.Options(
        emulate=adaptra.EmulatedDevice(op, op, op),
        faults=[f"slow 1.{stage} {factor:g}x @{HEALTHY}" for stage in range(stages)],
        on_event=told.append,
    )
    problem = small_problem(stages, MICROBATCHES)
    with adaptra.compile(**problem, options=options) as pipe:
        seconds = timed_in_a_row(lambda: pipe.step(*problem["example_inputs"]), HEALTHY + SWITCHING + COUNTED, before=0)
    return {"seconds": seconds, "shared": [event.step for event in told if event.kind is EventKind.SHARED]}


def real_rows(progress: Progress, op: float = 0.04) -> Iterator[Row]:
    """Yield the seconds of a step, over those of the simulated clock less one: how far it is off, of each setting."""
    for replicas, stages, factor in progress.track(SETTINGS, description="the clock against processes"):
        found = run_on_ranks(measure, replicas * stages, stages, factor, op)
        healthy = median(found["seconds"][SKIPPED:HEALTHY])
        case = SynchronyCase(replicas, 1000, {1: factor}, microbatches=MICROBATCHES, seconds=healthy)
        clock = [update.moment for update in islice(updates_of(Synchronous(), case, draw_times(case)), COUNTED)]
        measured, simulated = median(found["seconds"][-COUNTED:]), clock[-1] / COUNTED
        name = f"{replicas} replicas of {stages} stages, one at {factor:g}×"
        yield Row(f"{name}: shared from step", min(found["shared"], default=-1) - HEALTHY, None, "steps", 1)
        yield Row(f"{name}: step", measured, None, "s", COUNTED)
        yield Row(f"{name}: step of the clock", simulated, None, "s", COUNTED)
        yield Row(f"{name}: clock off by", abs(measured / simulated - 1), 0.05, "of it", COUNTED)
