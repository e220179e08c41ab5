"""Switches of plans in healthy training with short steps, while other processes use all cores.

Ranks over gloo with emulated devices, so short that a pause of the scheduler is as long as many ops. Beside them as many
processes compute as there are cores. Nothing turns slow on its own, so every switch is one too many: the bar is none. A
switch's claim is what its plan was said to gain. The last row is what it did gain: the median step of its time beside that
before it. ``--events`` shows what each switch claimed, and why. ``--come-and-go`` starts and ends the other processes at
random, from none to as many as ``--busy`` says, each time for as many seconds.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from os import cpu_count
from statistics import median
from typing import Any

from _ranks import run_on_ranks, small_problem
from _table import Row, parser, print_rows

import adaptra
from adaptra.runtime.control.plans.events import ControlEvent, EventKind

BESIDE = 20
"""How many steps before and after a switch are compared."""


def start(processes: int) -> list[subprocess.Popen[bytes]]:
    """So many processes that compute."""
    return [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]


def end(burners: list[subprocess.Popen[bytes]]) -> None:
    """End those processes."""
    for burner in burners:
        burner.kill()
        burner.wait()


@contextmanager
def busy(processes: int, seconds: float) -> Generator[None, None, None]:
    """So many processes that compute until the end. If they come and go, another number of them every so many seconds."""
    over, dice = threading.Event(), random.Random(0)

    def come_and_go() -> None:
        while not over.is_set():
            burners = start(dice.randint(0, processes))
            over.wait(seconds)
            end(burners)

    burners = [] if seconds else start(processes)
    changing = threading.Thread(target=come_and_go) if seconds else None
    if changing is not None:
        changing.start()
    try:
        yield
    finally:
        over.set()
        if changing is not None:
            changing.join()
        end(burners)


def measure(rank: int, ranks: int, microbatches: int, seconds: float, steps: int) -> dict[str, Any]:
    """One rank: how long its steps took, and its events."""
    told: list[ControlEvent] = []
    device = adaptra.EmulatedDevice(seconds, seconds, seconds) if seconds else None
    options = adaptra.Options(emulate=device, on_event=told.append)
    problem = small_problem(ranks, microbatches)
    taken: list[float] = []
    with adaptra.compile(**problem, options=options) as pipe:
        for _ in range(steps):
            started = time.perf_counter()
            pipe.step(*problem["example_inputs"])
            taken.append(time.perf_counter() - started)
    return {"taken": taken, "told": [event.to_json() for event in told]}


def gained(taken: list[float], switches: list[ControlEvent]) -> list[float]:
    """Of every switch that has enough steps beside it, how much shorter the steps after it are than those before it."""
    found: list[float] = []
    for switch in switches:
        before, after = taken[max(switch.step - BESIDE, 0) : switch.step], taken[switch.step : switch.step + BESIDE]
        if len(before) == len(after) == BESIDE:
            found.append(1 - median(after) / median(before))
    return found


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--microbatches", type=int, default=4)
    arguments.add_argument(
        "--op-ms", type=float, default=0.5, help="duration of every emulated op, milliseconds; 0 emulates none"
    )
    arguments.add_argument("--steps", type=int, default=20_000)
    arguments.add_argument("--busy", type=int, default=cpu_count(), help="processes that compute beside it")
    arguments.add_argument("--come-and-go", type=float, default=0.0, metavar="SECONDS", help="change their number so often")
    arguments.add_argument("--events", action="store_true", help="show what was proposed and run, on standard error")
    given = arguments.parse_args()
    with busy(given.busy, given.come_and_go):
        found = run_on_ranks(measure, given.ranks, given.ranks, given.microbatches, given.op_ms / 1e3, given.steps)
    told = [ControlEvent(**event | {"kind": EventKind(event["kind"])}) for event in found["told"]]
    if given.events:
        shown = (EventKind.DETECTED, EventKind.PROPOSED, EventKind.SWITCHED)
        print(*(event for event in told if event.kind in shown), sep="\n", file=sys.stderr)
    counts = Counter(event.kind for event in told)
    # What was calibrated is a first plan for this machine.
    switches = [event for event in told if event.kind is EventKind.SWITCHED and not event.text.startswith("calibrated")]
    proposals = {event.version: event for event in told if event.kind is EventKind.PROPOSED}
    claims = [
        1 - event.predicted / event.predicted_before
        for switch in switches
        if (event := proposals.get(switch.version)) is not None and event.predicted and event.predicted_before
    ]
    rows = [
        Row("switches", len(switches), 0, "switches", given.steps),
        Row("proposals", counts[EventKind.PROPOSED], 0, "proposals", given.steps),
        Row("detections", counts[EventKind.DETECTED], None, "detections", given.steps),
        Row("step, median", 1e3 * median(found["taken"]), None, "ms", given.steps),
        Row("a switch's claim, median", 100 * median(claims or [0.0]), None, "%", len(claims)),
        Row("a switch's gain, median", 100 * median(gained(found["taken"], switches) or [0.0]), None, "%", len(switches)),
    ]
    title = f"{given.steps} healthy steps, {given.ranks} ranks, {given.busy} other busy processes"
    print_rows(title, rows, baseline="bar", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
