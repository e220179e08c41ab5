"""Iteration time before and after ranks change roles, because the links between two replicas turned slow.

Two replicas of two stages, each replica on two hosts of its own; every op is padded to a stated duration (emulated devices).
The links between the replicas turn slow while training runs: averaging gradients then crosses them again and again. The ranks
settle their roles by measuring the links, so that the slow links join stages instead, and plans hide them. Before and after are
measured in one run over the same links; the baseline is before. The hosts need root, see ``tests/links/``.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

import torch
from _ranks import change_links, run_on_hosts, small_problem, timed
from _table import Row, parser, print_rows

import adaptra

STAGES = 2
BETWEEN = ("0-2", "0-3", "1-2", "1-3")
"""The links between the replicas."""


def measure(_rank: int, milliseconds: float, seconds: float, microbatches: int, runs: int) -> list[Any]:
    """One rank: median iterations over fast links, slow ones, and after the change; what it took; and the events of it."""
    problem = small_problem(STAGES, microbatches)
    batch: Any = problem["example_inputs"]
    options = adaptra.Options(emulate=adaptra.EmulatedDevice(seconds, seconds, seconds))
    with adaptra.compile(**problem, options=options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)

        def step() -> None:
            pipe.step(*batch)
            optimizer.step()
            optimizer.zero_grad()

        def iteration(warm_up: int) -> float:
            for _ in range(warm_up):
                step()
            return median(timed(step)[0] for _ in range(runs))

        found: list[Any] = [iteration(10)]
        for link in BETWEEN:
            change_links(f"{link} delay={milliseconds:g}ms")
        found.append(iteration(10))
        changes: list[Any] = []
        took, *_ = timed(lambda: changes.append(pipe.settle_roles(optimizer)))
        # The new pipelines calibrate and adapt to their slow edges first.
        found.append(iteration(25))
        (change,) = changes
        simulated = (None, None) if change is None else (change.seconds_before, change.seconds_after)
        return [*found, took, str(change), *simulated]


def main() -> int:
    """Start the hosts and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--delay", type=float, default=20.0, help="one way, milliseconds")
    arguments.add_argument("--op-ms", type=float, default=10.0, help="duration of every op, milliseconds")
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--runs", type=int, default=7)
    given = arguments.parse_args()
    fast, before, after, took, told, *simulated = run_on_hosts(
        measure, 4, [], given.delay, given.op_ms / 1e3, given.microbatches, given.runs
    )
    if simulated[0] is None:
        raise SystemExit(f"nobody changed roles: a step takes {1e3 * before:.0f} ms")
    rows = [
        Row("iteration, fast links", 1e3 * fast, None, "ms", given.runs),
        Row("iteration, links between replicas slow: before and after", 1e3 * after, 1e3 * before, "ms", given.runs),
        Row("the same, simulated", 1e3 * simulated[1], 1e3 * simulated[0], "ms", 1),
        Row("settling and moving, once", took, None, "s", 1),
    ]
    print_rows(
        f"roles, {given.op_ms:g} ms ops, {given.delay:g} ms between replicas: {told}",
        rows,
        baseline="before",
        as_json=given.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
