"""How much of REDUCE, the sum of gradients over replicas, is hidden behind the compute of other stages.

    bench/overlap.py                  2 replicas of 4 stages, whose REDUCE takes 10 % and 30 % of a step.
    bench/overlap.py --replicas 4     4 replicas of 4 stages, on 16 hosts.

Every rank is on a host of its own, and every op is padded to a stated duration (emulated devices). Links between workers of the
same stage have the rate at which REDUCE takes the stated share of a step. All other links carry what they can. The hosts need
root, see ``tests/links/``.

A stage sums its gradients as soon as its own ops have ended. Measured is the share of REDUCE that lies before the pipeline's
last op. The baseline is that share in the simulated step, for a REDUCE as long as the measured one. Figures are medians.

The further apart the stages end, the more is hidden. So two schedules are measured: 1F1B, and adaptra's own plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations
from statistics import median
from typing import Any

from _ranks import change_links, run_on_hosts, small_problem
from _table import Row, parser, print_rows

import adaptra
from adaptra.runtime.detection.reduces import StepReduces, hidden_seconds
from adaptra.simulation.simulate import simulate

STAGES = 4
WIDTH = 256
"""Of the layers: their gradients are 257 KiB a stage, so that the rates are far below what the hosts' router carries."""

NBYTES = 4 * (WIDTH * WIDTH + WIDTH)
"""The bytes of a stage's gradients."""

WARM_UP = 2
"""Steps after a change of rates that are not counted."""

OWN_PLAN = "own"
"""The name of the schedule that adaptra plans."""

LATEST = 60.0
"""Seconds within which all ranks have reported a step."""


def rate_for(replicas: int, seconds: float) -> float:
    """Return the bytes per second of each link at which a stage's REDUCE takes so long.

    Each of ``replicas`` parts has an owner. A link carries one part to its owner, and then the sum of another part back.
    """
    return 2 * NBYTES / replicas / seconds


def measure(
    _rank: int, schedule: str, replicas: int, microbatches: int, op_seconds: float, shares: list[float], steps: int
) -> dict[str, Any]:
    """One rank: REDUCE under one schedule, on the rank that coordinates the first replica.

    Returns:
        ``seconds`` and ``hidden`` of REDUCE by share, stage and step; on other ranks they are empty. And of the simulated step
        the ``ends`` of the stages' last ops, and the time that it is ``predicted`` to take.
    """
    problem = small_problem(STAGES, microbatches, WIDTH)
    batch: Any = problem["example_inputs"]
    gathered: dict[int, StepReduces] = {}

    def record(timestamped: Any) -> None:
        if isinstance(timestamped.record, StepReduces):
            gathered[timestamped.record.step] = timestamped.record

    options = adaptra.Options(
        schedule=None if schedule == OWN_PLAN else schedule,
        emulate=adaptra.EmulatedDevice(op_seconds, op_seconds, op_seconds),
        adapt=False,
        telemetry=adaptra.Telemetry(on_record=record),
    )
    found: dict[str, Any] = {"seconds": [], "hidden": []}
    with adaptra.compile(**problem, options=options) as pipe:
        plan, begun = pipe.plan, 0
        for share in shares:
            rate = rate_for(replicas, share * plan.predicted)
            for stage in range(STAGES):
                for first, second in combinations(range(stage, replicas * STAGES, STAGES), 2):
                    change_links(f"{first}-{second} rate={rate:.0f}")
            for _ in range(WARM_UP + steps):
                pipe.step(*batch)
            counted, begun = range(begun + WARM_UP, begun + WARM_UP + steps), begun + WARM_UP + steps
            if pipe.rank == 0:
                seconds, hidden = _of_stages(gathered, counted)
                found["seconds"].append(seconds)
                found["hidden"].append(hidden)
        return found | {"ends": simulate(plan.program, plan.case.cost).last_end, "predicted": plan.predicted}


def _of_stages(gathered: dict[int, StepReduces], counted: range) -> tuple[list[list[float]], list[list[float]]]:
    """Return the seconds and the hidden seconds of each stage in some steps, once all ranks have reported these."""
    deadline = time.monotonic() + LATEST
    while not set(counted) <= set(gathered):
        if time.monotonic() > deadline:
            raise TimeoutError(f"REDUCE of the steps {sorted(set(counted) - set(gathered))} was not reported by all ranks")
        time.sleep(0.01)
    stages = [[gathered[step].stages[stage] for step in counted] for stage in range(STAGES)]
    return [[one.seconds for one in each] for each in stages], [[one.hidden or 0.0 for one in each] for each in stages]


def rows_of(schedule: str, shares: list[float], found: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows of one schedule from what :func:`measure` found."""
    ends, predicted = found["ends"], found["predicted"]
    for share, by_stage, hidden_by_stage in zip(shares, found["seconds"], found["hidden"], strict=True):
        for stage, (seconds, hidden) in enumerate(zip(by_stage, hidden_by_stage, strict=True)):
            usual = median(seconds)
            ours = median(part / whole for part, whole in zip(hidden, seconds, strict=True))
            simulated = hidden_seconds(ends[stage], ends[stage] + usual, max(ends)) / usual
            name = f"{schedule}, {100 * share:g} %, stage {stage}"
            yield Row(f"{name}: hidden", 100 * ours, 100 * simulated, "% of REDUCE", len(seconds))
            yield Row(f"{name}: REDUCE", 100 * usual / predicted, 100 * share, "% of a step", len(seconds))


def main() -> None:
    """Start the hosts and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, default=2)
    arguments.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.3], help="of a step that REDUCE takes")
    arguments.add_argument("--schedules", nargs="+", default=["1f1b", OWN_PLAN], choices=[*adaptra.GENERATORS, OWN_PLAN])
    arguments.add_argument("--op-ms", type=float, default=10.0, help="duration of every op, milliseconds")
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=10, help="steps of each share")
    given = arguments.parse_args()
    if given.replicas < 2 or given.steps < 1 or min(given.shares) <= 0:
        arguments.error("expected two replicas or more, a step or more, and shares above 0")
    how = (given.replicas, given.microbatches, given.op_ms / 1e3, given.shares, given.steps)
    rows: list[Row] = []
    for schedule in given.schedules:
        found = run_on_hosts(measure, given.replicas * STAGES, [], schedule, *how, steady=True)
        rows += rows_of(schedule, given.shares, found)
    title = f"{given.replicas} replicas of {STAGES} stages, {given.microbatches} microbatches, {given.op_ms:g} ms ops"
    print_rows(title, rows, baseline="simulated", as_json=given.json)


if __name__ == "__main__":
    main()
