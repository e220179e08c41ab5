"""Jobs whose updates the clock decides on, each run again by its log: bits that differ, and steps that are lost or doubled.

In each job every site makes its own number of steps, and each step takes a random time. So the clock decides who takes part in
which exchange, or whose gradients are in which update. What a site has trained on has to be in them once, whichever these are.
With a deadline all make as many steps, and the clock decides which microbatches are deferred to the next one.
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

SITES, ROWS, STEPS = 4, 4, 12
"""Sites, rows of a step, and the fewest steps of a site."""

MODES: dict[str, Any] = {
    "local": adaptra.Local(2, quorum=3, grace=0.005),
    "x-order": adaptra.XOrder(3),
    "asynchronous": adaptra.XOrder(1, staleness=4),
    "groups": adaptra.XOrder(groups="auto", staleness=4),
    "deadline": adaptra.Deadline(0.8),
}
"""Those in which the clock decides."""


def train(mode: str, log: list[Any] | None, seed: int, stages: int) -> tuple[list[int], list[Any], int]:
    """Checksums of this rank's parameters after each step and in the end, its log, and its steps."""
    has_deadline = isinstance(MODES[mode], adaptra.Deadline)
    microbatches = ROWS if has_deadline else 2
    problem = small_problem(stages, microbatches, rows=ROWS // microbatches)
    options = adaptra.Options(adapt=False, synchrony=MODES[mode])
    checksums: list[int] = []
    with adaptra.compile(**problem, options=options) as pipe:
        if log is not None:
            pipe.replay(log)
        drawn = random.Random(f"{seed}/{pipe.replica}")
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
        pipe.attach(optimizer)

        def add() -> None:
            checksums.append(zlib.crc32(b"".join(one.detach().numpy().tobytes() for one in pipe.parameters())))

        inputs, targets = problem["example_inputs"]
        steps = STEPS if has_deadline else STEPS + drawn.randrange(4)
        for step in range(steps):
            seconds = drawn.choice((0.0, 0.01, 0.1))
            time.sleep(seconds if log is None else 0.0)
            if has_deadline and step == steps - 1:
                pipe.defer_nothing()
            pipe.step(inputs * (1 + pipe.replica + 0.1 * step), targets)
            optimizer.step()
            optimizer.zero_grad()
            add()
        if not has_deadline:
            pipe.exchange()
            add()
        return checksums, [*pipe.exchange_log], steps


def measure(rank: int, mode: str, seeds: list[int], stages: int) -> dict[str, int]:
    """Over all jobs and sites: exchanges, those without some site, steps that differ, rows lost or doubled, unlike sites.

    Of updates in x-order also the age of the oldest gradient.
    """
    counted: dict[str, int] = dict.fromkeys(("exchanges", "missed", "differ", "lost", "unlike", "oldest"), 0)
    for seed in seeds:
        checksums, log, steps = train(mode, None, seed, stages)
        again, _, _ = train(mode, log, seed, stages)
        weights = [0.0] * stages
        for one in log:
            if "parts" in one:  # a step up to a deadline, whose microbatches have a row each
                weights = [each + one["parts"][rank // stages]["count"] for each in weights]
                continue
            own_weight = sum(vote["weight"] for vote in one["votes"] if vote["site"] == rank // stages)
            if "stage" in one:
                weights[one["stage"]] += own_weight
            else:  # an update is of all stages
                weights = [each + own_weight for each in weights]
                if not one["votes"][0]["is_last"]:
                    ages = [one["number"] - 1 - vote["updates"] for vote in one["votes"]]
                    counted["oldest"] = max(counted["oldest"], *ages)
        own = {
            "differ": sum(one != other for one, other in zip(checksums, again, strict=True)),
            "lost": int(sum(abs(one - ROWS * steps) for one in weights)),
            "exchanges": len(log),
            "missed": sum(lacks_some(one, SITES) for one in log),
        }
        gathered: list[Any] = [None] * (SITES * stages)
        dist.all_gather_object(gathered, (own, checksums[-1]))
        for name in own:
            counted[name] += sum(each[name] for each, _ in gathered)
        counted["unlike"] += len({last for _, last in gathered}) > stages
        if rank == 0:
            print(f"\rjob {seed + 1} of {len(seeds)}", end="", file=sys.stderr)
    return counted


def lacks_some(entry: dict[str, Any], sites: int) -> bool:
    """Whether an exchange lacks one of this many sites, or replicas have unlike numbers of microbatches in a step."""
    return len({part["count"] for part in entry["parts"]}) > 1 if "parts" in entry else len(entry["votes"]) < sites


def main() -> int:
    """Start the ranks and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--mode", choices=MODES, default="local")
    arguments.add_argument("--logs", type=int, default=20, help="jobs, each with a log of its own")
    arguments.add_argument("--stages", type=int, default=1, help="of each site")
    given = arguments.parse_args()
    found = run_on_ranks(measure, SITES * given.stages, given.mode, list(range(given.logs)), given.stages)
    print(file=sys.stderr)
    rows = [
        Row("checksums that differ in the run by its log", found["differ"], 0, "steps", given.logs),
        Row("rows lost or doubled", found["lost"], 0, "rows", given.logs),
        Row("jobs whose sites differ after exchange()", found["unlike"], 0, "jobs", given.logs),
        Row("exchanges that not all sites were in alike, of all", found["missed"], found["exchanges"], "exchanges", given.logs),
    ]
    limit = getattr(MODES[given.mode], "staleness", None)
    if limit is not None:
        rows.append(
            Row("age of the oldest gradient that the first rank has seen", found["oldest"], limit, "updates", given.logs)
        )
    print_rows(
        f"{given.mode}: {SITES} sites of {given.stages}, {STEPS} steps or more",
        rows,
        baseline="bar, or all",
        as_json=given.json,
    )
    return int(any(found[name] for name in ("differ", "lost", "unlike")) or (limit is not None and found["oldest"] > limit))


if __name__ == "__main__":
    sys.exit(main())
