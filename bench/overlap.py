"""What REDUCE, the sum of gradients over replicas, costs a step.

    bench/overlap.py                  2 replicas of 4 stages, whose REDUCE takes 10 % and 30 % of a step.
    bench/overlap.py --replicas 4     4 replicas of 4 stages, on 16 hosts.
    bench/overlap.py --buckets 1      The sum begins after the last W, instead of while it runs.

Every rank is on a host of its own, and every op is padded to a stated duration (emulated devices). Links between workers of the
same stage have the rate at which REDUCE takes the stated share of a step. Before that they have no limit. All other links carry
what they can. The hosts need root, see ``tests/links/``.

Steps follow each other as in training. Figures are medians. Of each share there are these rows:

- Of each stage the hidden share of REDUCE, which does not delay the stage's next step. The baseline is that share in the
  simulated step, for sums as long as the measured ones. Stage 0 hides what travels while its last W runs.
- A step, beside the bound: a step without a limit, and what stage 0 can't hide. That is the time its gradients need on a link,
  without the time from its first complete bucket to the end of its last W.
- What REDUCE adds to a step without a limit, beside 1.1 times what stage 0 can't hide, which is the bar.
- A step, beside one without overlap: a step without a limit, and the slowest stage's REDUCE after a barrier. It is not run.

Two schedules are measured: 1F1B, and adaptra's own plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import median
from typing import Any

from _ranks import change_links, layer, run_on_hosts, small_problem, timed_in_a_row
from _table import Row, parser, print_rows
from torch import nn

import adaptra
from adaptra.runtime.measuring.reduces import StepReduces, exposed_seconds
from adaptra.simulation.simulate import simulate

STAGES = 4
LAYERS = 4
"""Of each stage."""

WIDTH = 128
"""Of the layers: their gradients are 258 KiB a stage, so that the rates are far below what the hosts' router carries."""

NBYTES = LAYERS * 4 * (WIDTH * WIDTH + WIDTH)
"""The bytes of a stage's gradients."""

WARM_UP = 2
"""Steps after a change of rates that are not counted."""

BAR = 1.1
"""What REDUCE may add to a step, in units of what stage 0 can't hide."""

OWN_PLAN = "own"
"""The name of the schedule that adaptra plans."""

LATEST = 60.0
"""Seconds within which all ranks have reported a step."""


def rate_for(replicas: int, seconds: float) -> float:
    """Return the bytes per second of each link at which a stage's REDUCE takes so long.

    Each of ``replicas`` parts has an owner. A link carries one part to its owner, and then the sum of another part back.
    """
    return 2 * NBYTES / replicas / seconds


def layers(width: int) -> nn.Module:
    """One stage of the model."""
    return nn.Sequential(*(layer(width) for _ in range(LAYERS)))


def measure(
    _rank: int,
    schedule: str,
    replicas: int,
    microbatches: int,
    op_seconds: float,
    buckets: int,
    shares: list[float],
    steps: int,
) -> dict[str, Any]:
    """One rank: REDUCE under one schedule, on the rank that coordinates the first replica.

    Returns:
        ``seconds`` and ``exposed`` of REDUCE by share, stage and step; on other ranks they are empty. ``unlimited``: the
        seconds of each step without a limit. ``limited``: those by share. ``starts`` and ``ends``: of each
        stage's first and last op in the simulated step. ``predicted``: the time that this takes.
    """
    problem = small_problem(STAGES, microbatches, WIDTH, make=layers)
    batch: Any = problem["example_inputs"]
    gathered: dict[int, StepReduces] = {}

    def record(timestamped: Any) -> None:
        if isinstance(timestamped.record, StepReduces):
            gathered[timestamped.record.step] = timestamped.record

    options = adaptra.Options(
        schedule=None if schedule == OWN_PLAN else schedule,
        emulate=adaptra.EmulatedDevice(op_seconds, op_seconds, op_seconds),
        adapt=False,
        reduce=adaptra.Reduce(bucket=NBYTES // buckets),
        telemetry=adaptra.Telemetry(on_record=record),
    )
    found: dict[str, Any] = {"seconds": [], "exposed": [], "limited": []}
    with adaptra.compile(**problem, options=options) as pipe:
        plan = pipe.plan
        # REDUCE of a step is known once the next one has ended, so one step more is run than counts.
        found["unlimited"] = timed_in_a_row(lambda: pipe.step(*batch), steps + 1, WARM_UP)
        begun = WARM_UP + steps + 1
        for share in shares:
            rate = rate_for(replicas, share * plan.predicted)
            for stage in range(STAGES):
                for first, second in combinations(range(stage, replicas * STAGES, STAGES), 2):
                    change_links(f"{first}-{second} rate={rate:.0f}")
            found["limited"].append(timed_in_a_row(lambda: pipe.step(*batch), steps + 1, WARM_UP))
            counted, begun = range(begun + WARM_UP, begun + WARM_UP + steps), begun + WARM_UP + steps + 1
            if pipe.rank == 0:
                seconds, exposed = _of_stages(gathered, counted)
                found["seconds"].append(seconds)
                found["exposed"].append(exposed)
        simulated = simulate(plan.program, plan.case.cost)
        return found | {"starts": simulated.first_start, "ends": simulated.last_end, "predicted": plan.predicted}


def _of_stages(gathered: dict[int, StepReduces], counted: range) -> tuple[list[list[float]], list[list[float | None]]]:
    """Return the seconds and the exposed seconds of each stage in some steps, once all ranks have reported these."""
    deadline = time.monotonic() + LATEST
    while not set(counted) <= set(gathered):
        if time.monotonic() > deadline:
            raise TimeoutError(f"REDUCE of the steps {sorted(set(counted) - set(gathered))} was not reported by all ranks")
        time.sleep(0.01)
    stages = [[gathered[step].stages[stage] for step in counted] for stage in range(STAGES)]
    return [[one.seconds for one in each] for each in stages], [[one.exposed for one in each] for each in stages]


def simulated_exposed(starts: Sequence[float], ends: Sequence[float], sums: Sequence[float], early: float) -> list[float]:
    """Return the exposed seconds of each stage's REDUCE in a step that repeats.

    Args:
        starts: When the first op of each stage starts in the step.
        ends: When its last op ends.
        sums: How long its REDUCE takes.
        early: How long before the end of its last op it begins.
    """
    sums = [max(seconds - early, 0.0) for seconds in sums]
    period = max(end - start + seconds for start, end, seconds in zip(starts, ends, sums, strict=True))
    found: list[float] = []
    for stage, (start, end, seconds) in enumerate(zip(starts, ends, sums, strict=True)):
        arrived = period + start if stage else -math.inf
        found.append(exposed_seconds(end, end + seconds, end, end + seconds, arrived))
    return found


def rows_of(schedule: str, shares: list[float], found: dict[str, Any], early: float) -> Iterator[Row]:
    """Yield the rows of one schedule from what :func:`measure` found. Sums begin ``early`` before the last W ends."""
    predicted, unlimited = found["predicted"], median(found["unlimited"])
    yield Row(f"{schedule}: step without a limit", unlimited, None, "s", len(found["unlimited"]))
    for share, seconds, exposed, limited in zip(shares, found["seconds"], found["exposed"], found["limited"], strict=True):
        usual = [median(each) for each in seconds]
        simulated = simulated_exposed(found["starts"], found["ends"], usual, early)
        name = f"{schedule}, {100 * share:g} %"
        for stage, (sums, parts) in enumerate(zip(seconds, exposed, strict=True)):
            assert None not in parts, "each counted step is followed by another at once"
            ours = median(1 - part / whole for part, whole in zip(parts, sums, strict=True))
            row = f"{name}, stage {stage}"
            yield Row(f"{row}: hidden", 100 * ours, 100 * (1 - simulated[stage] / usual[stage]), "% of REDUCE", len(sums))
            yield Row(f"{row}: REDUCE", 100 * usual[stage] / predicted, 100 * share, "% of a step", len(sums))
        step, least = median(limited), max(share * predicted - early, 0.0)
        yield Row(f"{name}: step, beside the bound", step, unlimited + least, "s", len(limited))
        yield Row(f"{name}: added to a step, beside the bar", step - unlimited, BAR * least, "s", len(limited))
        yield Row(f"{name}: step, beside one without overlap", step, unlimited + max(usual), "s", len(limited))


def main() -> None:
    """Start the hosts and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, default=2)
    arguments.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.3], help="of a step that REDUCE takes")
    arguments.add_argument("--schedules", nargs="+", default=["1f1b", OWN_PLAN], choices=[*adaptra.GENERATORS, OWN_PLAN])
    arguments.add_argument("--op-ms", type=float, default=10.0, help="duration of every op, milliseconds")
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--buckets", type=int, default=LAYERS, help="of a stage's gradients, which leave one by one")
    arguments.add_argument("--steps", type=int, default=10, help="steps of each share")
    given = arguments.parse_args()
    if given.replicas < 2 or given.steps < 1 or given.buckets < 1 or min(given.shares) <= 0:
        arguments.error("expected two replicas or more, a step or more, a bucket or more, and shares above 0")
    op_seconds = given.op_ms / 1e3
    how = (given.replicas, given.microbatches, op_seconds, given.buckets, given.shares, given.steps)
    rows: list[Row] = []
    for schedule in given.schedules:
        found = run_on_hosts(measure, given.replicas * STAGES, [], schedule, *how, steady=True)
        rows += rows_of(schedule, given.shares, found, op_seconds * (1 - 1 / given.buckets))
    title = f"{given.replicas} replicas of {STAGES} stages, {given.microbatches} microbatches, {given.op_ms:g} ms ops"
    print_rows(title, rows, baseline="simulated or bound", as_json=given.json)


if __name__ == "__main__":
    main()
