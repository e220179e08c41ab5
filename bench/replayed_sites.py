"""Jobs of sites of which a quorum suffices, each run again by its log: bits that differ, and steps that are lost or doubled.

In each job every site makes its own number of steps, and each step takes a random time. So the clock decides who takes part in
which exchange. What a site has trained on has to be in exchanges once, whichever these are.
"""

from __future__ import annotations

import random
import sys
import time
import zlib
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run_on_ranks, small_problem
from _table import Row, parser, print_rows

import adaptra

SITES, QUORUM, ROWS, STEPS = 4, 3, 4, 12
"""Sites, those that suffice, rows of a step, and the fewest steps of a site."""


def train(log: list[Any] | None, seed: int, stages: int) -> tuple[list[int], list[Any], int]:
    """Checksums of this rank's parameters after each step and in the end, its log, and its steps."""
    problem = small_problem(stages, 2, rows=ROWS // 2)
    options = adaptra.Options(adapt=False, synchrony=adaptra.Local(2, quorum=QUORUM, grace=0.005))
    checksums: list[int] = []
    with adaptra.compile(**problem, options=options) as pipe:
        if log is not None:
            pipe.replay(log)
        drawn = random.Random(f"{seed}/{pipe.replica}")
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)

        def add() -> None:
            checksums.append(zlib.crc32(b"".join(one.detach().numpy().tobytes() for one in pipe.parameters())))

        inputs, targets = problem["example_inputs"]
        steps = STEPS + drawn.randrange(4)
        for step in range(steps):
            seconds = drawn.choice((0.0, 0.01, 0.1))
            time.sleep(seconds if log is None else 0.0)
            pipe.step(inputs * (1 + pipe.replica + 0.1 * step), targets)
            optimizer.step()
            optimizer.zero_grad()
            add()
        pipe.exchange()
        add()
        return checksums, [*pipe.exchange_log], steps


def measure(rank: int, seeds: list[int], stages: int) -> dict[str, int]:
    """Over all jobs and sites: exchanges, those without some site, steps that differ, rows lost or doubled, unlike sites."""
    counted: dict[str, int] = dict.fromkeys(("exchanges", "missed", "differ", "lost", "unlike"), 0)
    for seed in seeds:
        checksums, log, steps = train(None, seed, stages)
        again, _, _ = train(log, seed, stages)
        weights = [0.0] * stages
        for one in log:
            weights[one["stage"]] += sum(vote["weight"] for vote in one["votes"] if vote["site"] == rank // stages)
        own = {
            "differ": sum(one != other for one, other in zip(checksums, again, strict=True)),
            "lost": int(sum(abs(one - ROWS * steps) for one in weights)),
            "exchanges": len(log),
            "missed": sum(len(one["votes"]) < SITES for one in log),
        }
        gathered: list[Any] = [None] * (SITES * stages)
        dist.all_gather_object(gathered, (own, checksums[-1]))
        for name in own:
            counted[name] += sum(each[name] for each, _ in gathered)
        counted["unlike"] += len({last for _, last in gathered}) > stages
        if rank == 0:
            print(f"\rjob {seed + 1} of {len(seeds)}", end="", file=sys.stderr)
    return counted


def main() -> int:
    """Start the ranks and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--logs", type=int, default=20, help="jobs, each with a log of its own")
    arguments.add_argument("--stages", type=int, default=1, help="of each site")
    given = arguments.parse_args()
    found = run_on_ranks(measure, SITES * given.stages, list(range(given.logs)), given.stages)
    print(file=sys.stderr)
    rows = [
        Row("checksums that differ in the run by its log", found["differ"], 0, "steps", given.logs),
        Row("rows lost or doubled", found["lost"], 0, "rows", given.logs),
        Row("jobs whose sites differ after exchange()", found["unlike"], 0, "jobs", given.logs),
        Row("exchanges that not all sites were in, of all", found["missed"], found["exchanges"], "exchanges", given.logs),
    ]
    print_rows(
        f"{SITES} sites of {given.stages}, {QUORUM} suffice, {STEPS} steps or more",
        rows,
        baseline="bar, or all",
        as_json=given.json,
    )
    return int(any(found[name] for name in ("differ", "lost", "unlike")))


if __name__ == "__main__":
    sys.exit(main())
