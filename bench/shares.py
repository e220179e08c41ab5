"""Steps of several replicas while one worker is slow or one link narrow, with and without help from the other replicas.

Ops are emulated, so that all ranks fit this machine; detection, planning and switching are real. The worker turns slow by an
injected fault. The link turns narrow where each rank is a host of its own, joined by links with a stated rate (``--narrow``).
A message over it then takes six forwards each way. Both sides adapt: without shares (``Options(share=False)``) each replica
reorders its own microbatches. Losses and parameters must be bitwise those of a run in which nothing happens.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _ranks import WIDTH, change_links, run_on_hosts, run_on_ranks, small_problem, timed_in_a_row
from _table import Row, parser, print_rows

import adaptra
from adaptra.runtime.control.events import ControlEvent, EventKind

SETTLING = 10
"""Steps before the onset: warm-up, calibration, and the switch to the order for the measured costs."""

REACTION = 3
"""Steps after an onset or a recovery that are not counted."""

ROUTED = (EventKind.SHARED, EventKind.DETOURED)


def train(
    pipe: adaptra.Pipeline, optimizer: torch.optim.Optimizer, batch: tuple[Any, Any], keep: Callable[[bytes], None]
) -> None:
    """One step of training on rows that differ by replica. What the loss is, is kept."""
    inputs, targets = batch
    keep(pipe.step(inputs + pipe.replica, targets).numpy().tobytes())
    optimizer.step()
    optimizer.zero_grad()


def measure(
    rank: int,
    stages: int,
    microbatches: int,
    rows: int,
    seconds: float,
    faults: Sequence[str],
    changes: Sequence[str],
    length: int,
) -> dict[str, Any]:
    """One rank: seconds of each step undisturbed, without shares and with shares, digests of these runs, and the events."""
    found: dict[str, Any] = {}
    for name, share, is_disturbed in (("healthy", True, False), ("alone", False, True), ("shared", True, True)):
        told: list[ControlEvent] = []
        options = adaptra.Options(
            share=share,
            schedule="1f1b",
            emulate=adaptra.EmulatedDevice(seconds, seconds, seconds),
            faults=list(faults) if is_disturbed else [],
            on_event=told.append,
        )
        given = small_problem(stages, microbatches, rows=rows)
        digest = hashlib.sha256()
        times: list[float] = []
        with adaptra.compile(**given, options=options) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
            step = partial(train, pipe, optimizer, given["example_inputs"], digest.update)
            for part, change in zip((SETTLING, length, length), (None, *(changes or (None, None))), strict=True):
                if change is not None and is_disturbed:
                    change_links(change)
                times += timed_in_a_row(step, part, before=0)
            for parameter in pipe.parameters():
                digest.update(parameter.detach().numpy().tobytes())
        events = [[event.kind.value, event.step, event.text] for event in told]
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, digest.hexdigest())
        found[name] = {"seconds": times, "digests": digests, "events": events}
        dist.barrier()
    return found


def rows_of(found: dict[str, Any], length: int) -> list[Row]:
    """The rows of the table."""
    onset, healed = SETTLING, SETTLING + length
    disturbed, after = slice(onset + REACTION, healed), slice(healed + REACTION, None)
    times = {name: one["seconds"] for name, one in found.items()}
    healthy, alone, shared = (median(times[name][disturbed]) for name in ("healthy", "alone", "shared"))
    routed = [step for kind, step, _ in found["shared"]["events"] if kind in [one.value for one in ROUTED] and step > onset]
    back = [step for kind, step, _ in found["shared"]["events"] if kind == "switched" and step > healed]
    differing = sum(one != other for one, other in zip(found["shared"]["digests"], found["healthy"]["digests"], strict=True))
    count = length - REACTION
    rows = [
        Row("disturbed step, without shares", shared, alone, "s", count),
        Row("disturbed step ÷ healthy step", shared / healthy, alone / healthy, "", count),
        Row("step after it ÷ healthy step", median(times["shared"][after]) / healthy, 1.0, "", count),
        Row("steps until microbatches are routed", min(routed, default=0) - onset, 3, "steps", 1),
        Row("ranks with other losses or parameters", differing, 0, "ranks", 1),
    ]
    if back:  # a detour that costs nothing stays: the link that it avoids is not measured
        rows.append(Row("steps until they are back", min(back) - healed, 5, "steps", 1))
    return rows


def main() -> int:
    """Start the ranks and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, default=4)
    arguments.add_argument("--stages", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--op-ms", type=float, default=40.0, help="duration of every emulated op, milliseconds")
    arguments.add_argument("--factor", type=float, default=2.0, help="how many times slower the worker's ops are")
    arguments.add_argument("--length", type=int, default=12, help="steps of the disturbance, and steps after it")
    arguments.add_argument("--narrow", action="store_true", help="a narrow link between hosts, in place of a slow worker")
    arguments.add_argument("--events", action="store_true", help="print the controller's events on standard error")
    given = arguments.parse_args()
    seconds, ranks = given.op_ms / 1e3, given.replicas * given.stages
    if given.narrow:
        rows = 4096
        rate = rows * WIDTH * 4 / (6 * seconds) / 1e6
        healthy = f"0-1 rate={12 * rate:.3f}MB"
        setting = (given.stages, given.microbatches, rows, seconds, [], [f"0-1 rate={rate:.3f}MB", healthy], given.length)
        found = run_on_hosts(measure, ranks, [healthy], *setting)
        what = f"a link of {rate:.3g} MB/s between stages 0 and 1 of replica 0"
    else:
        stage = given.stages // 2
        fault = f"slow 1.{stage} {given.factor:g}x @{SETTLING}..{SETTLING + given.length}"
        setting = (given.stages, given.microbatches, 2, seconds, [fault], [], given.length)
        found = run_on_ranks(measure, ranks, *setting)
        what = f"worker 1.{stage} {given.factor:g}× slower"
    if given.events:
        for name, one in found.items():
            for kind, step, text in one["events"]:
                print(f"{name}: step {step}: {kind}: {text}", file=sys.stderr)
            print(f"{name}: {[round(each, 3) for each in one['seconds']]}", file=sys.stderr)
    title = (
        f"{given.replicas} replicas of {given.stages} stages, {given.microbatches} microbatches, {given.op_ms:g} ms ops; {what}"
    )
    print_rows(title, rows_of(found, given.length), baseline="without shares, or bar", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
