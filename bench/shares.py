"""Steps of several replicas while one worker is slow or one link narrow, with and without help from the other replicas.

Ops are emulated, so that all ranks fit this machine; detection, planning and switching are real. The worker turns slow by an
injected fault. The link turns narrow where each rank is a host of its own, joined by links with a stated rate (``--narrow``).
A message over it then takes six forwards each way. With ``--links 3`` that happens to the same link of three replicas at once.
Both sides adapt: without shares (``Options(share=False)``) each replica reorders its own microbatches. Losses and parameters
must be bitwise those of a run in which nothing happens.

The flow bound is a bound of a step's time under every routing, for the stated durations of ops and rates of links.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _ranks import WIDTH, change_links, run_on_hosts, run_on_ranks, small_problem, timed_in_a_row
from _table import Row, parser, print_rows

import adaptra
from adaptra.planning.routes.period_bound import flow_bound
from adaptra.program.placement import in_turn
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.step_messages.rate_probes import EVERY as RATE_EVERY
from adaptra.simulation.case import Case, WorkerLink
from adaptra.simulation.cost import CostModel

SETTLING = 10
"""Steps before the onset: warm-up, calibration, and the switch to the order for the measured costs."""

REACTION = 3
"""Steps after an onset or a recovery that are not counted."""

ROUTED = (EventKind.SHARED.value, EventKind.DETOURED.value)


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
    changes: Sequence[Sequence[str]],
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
                    change_links(*change)
                times += timed_in_a_row(step, part, before=0)
            for parameter in pipe.parameters():
                digest.update(parameter.detach().numpy().tobytes())
        events = [[event.kind.value, event.step, event.text, event.predicted] for event in told]
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, digest.hexdigest())
        found[name] = {"seconds": times, "digests": digests, "events": events}
        dist.barrier()
    return found


def case_of(replicas: int, stages: int, microbatches: int, seconds: float, narrow: Sequence[tuple[int, int]]) -> Case:
    """The case of the stated durations of ops, in which messages over some links between two workers take six of them."""
    cost = CostModel.uniform(stages, seconds, seconds, seconds)
    links = {ends: WorkerLink(0.0, 6 * seconds) for pair in narrow for ends in (pair, pair[::-1])}
    return replace(Case(cost, microbatches, in_turn(stages)).of_replicas(replicas), links=links)


def rows_of(found: dict[str, Any], length: int, bound: float | None) -> list[Row]:
    """The rows of the table. ``bound`` is the flow bound, seconds."""
    onset, healed = SETTLING, SETTLING + length
    disturbed, after = slice(onset + REACTION, healed), slice(healed + REACTION, None)
    times = {name: one["seconds"] for name, one in found.items()}
    healthy, alone, shared = (median(times[name][disturbed]) for name in ("healthy", "alone", "shared"))
    ours = [(step, predicted) for kind, step, _, predicted in found["shared"]["events"] if kind in ROUTED and step > onset]
    routed = [step for step, _ in ours]
    back = [step for kind, step, *_ in found["shared"]["events"] if kind == "switched" and step > healed]
    differing = sum(one != other for one, other in zip(found["shared"]["digests"], found["healthy"]["digests"], strict=True))
    count = length - REACTION
    rows = [
        Row("disturbed step, without shares", shared, alone, "s", count),
        Row("disturbed step ÷ healthy step", shared / healthy, alone / healthy, "", count),
        Row("step after it ÷ healthy step", median(times["shared"][after]) / healthy, 1.0, "", count),
        Row("steps until microbatches are routed", min(routed, default=0) - onset, 3, "steps", 1),
        Row("ranks with other losses or parameters", differing, 0, "ranks", 1),
    ]
    if bound is not None:
        rows.append(Row("disturbed step ÷ flow bound", shared / bound, 1.1, "", count))
        if ours:
            rows.append(Row("predicted step ÷ flow bound", min(predicted for _, predicted in ours) / bound, 1.1, "", 1))
    if back:  # a narrow link is measured in one of eight steps while a detour avoids it
        rows.append(Row("steps until they are back", min(back) - healed, 5 if bound is None else RATE_EVERY + 5, "steps", 1))
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
    arguments.add_argument("--links", type=int, default=1, help="with --narrow: the number of replicas whose link turns narrow")
    arguments.add_argument("--events", action="store_true", help="print the controller's events on standard error")
    given = arguments.parse_args()
    if not 1 <= given.links <= given.replicas:
        arguments.error(f"--links {given.links}: expected from one to all of the {given.replicas} replicas")
    seconds, ranks = given.op_ms / 1e3, given.replicas * given.stages
    if given.narrow:
        rows = 4096
        rate = rows * WIDTH * 4 / (6 * seconds) / 1e6
        pairs = [(replica * given.stages, replica * given.stages + 1) for replica in range(given.links)]
        wide, narrow = ([f"{here}-{there} rate={one:.3f}MB" for here, there in pairs] for one in (12 * rate, rate))
        setting = (given.stages, given.microbatches, rows, seconds, [], [narrow, wide], given.length)
        found = run_on_hosts(measure, ranks, wide, *setting)
        replicas = "replica 0" if given.links == 1 else f"each of {given.links} replicas"
        what = f"a link of {rate:.3g} MB/s between stages 0 and 1 of {replicas}"
        bound = flow_bound(case_of(given.replicas, given.stages, given.microbatches, seconds, pairs)).value
    else:
        stage = given.stages // 2
        fault = f"slow 1.{stage} {given.factor:g}x @{SETTLING}..{SETTLING + given.length}"
        setting = (given.stages, given.microbatches, 2, seconds, [fault], [], given.length)
        found = run_on_ranks(measure, ranks, *setting)
        what = f"worker 1.{stage} {given.factor:g}× slower"
        bound = None
    if given.events:
        for name, one in found.items():
            for kind, step, text, _ in one["events"]:
                print(f"{name}: step {step}: {kind}: {text}", file=sys.stderr)
            print(f"{name}: {[round(each, 3) for each in one['seconds']]}", file=sys.stderr)
    title = (
        f"{given.replicas} replicas of {given.stages} stages, {given.microbatches} microbatches, {given.op_ms:g} ms ops; {what}"
    )
    print_rows(title, rows_of(found, given.length, bound), baseline="without shares, or bar", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
