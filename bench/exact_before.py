"""Steps of `exact` beside those of an earlier checkout: what modes of synchronisation cost a job that does not use them.

Both checkouts have an environment of their own, in which adaptra is installed from them. A job of two replicas of each is
started, and they take turns by some steps. So what slows the machine for longer slows both. Processor time counts, of the first
replica. Buckets of gradients have a given size. Each start would choose it by links that it measures, and one bucket more is a
fifth of such a step. The interval is over starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
from _ranks import free_port, small_problem
from _table import Row, half_interval, parser, print_rows

import adaptra

HERE = Path(__file__).resolve()
REPLICAS, BAR = 2, 1.005
BUCKET = 256 << 10


def serve(steps: int) -> None:
    """Make so many steps for each line that is read, and print the milliseconds of one: of the processor, and of the day."""
    torch.set_num_threads(1)
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[int(os.environ["RANK"]) % len(processors)]})
    dist.init_process_group("gloo")
    problem = small_problem(1, 8, width=384, rows=32)
    options = adaptra.Options(adapt=False, reduce=adaptra.Reduce(bucket=BUCKET))
    with adaptra.compile(**problem, options=options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
        for _ in sys.stdin:
            began = time.process_time(), time.monotonic()
            for _ in range(steps):
                pipe.step(*problem["example_inputs"])
                optimizer.step()
                optimizer.zero_grad()
            ended = time.process_time(), time.monotonic()
            print(json.dumps([1e3 * (now - before) / steps for now, before in zip(ended, began, strict=True)]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


class Job:
    """The ranks of a checkout.

    Args:
        checkout: Its folder.
        steps: The steps of a turn.
    """

    def __init__(self, checkout: Path, steps: int) -> None:
        command = [str(checkout / ".venv/bin/python"), str(HERE), "--serve", "--steps", str(steps)]
        there = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(REPLICAS)}
        self._ranks = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=checkout,
                env=there | {"RANK": str(rank)},
                text=True,
            )
            for rank in range(REPLICAS)
        ]

    def turn(self) -> list[float]:
        """Return what the first rank prints for a turn of all."""
        for rank in self._ranks:
            assert rank.stdin is not None
            print(file=rank.stdin, flush=True)
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(lines):
            raise SystemExit("a rank has ended, as it says above")
        return json.loads(lines[0])

    def end(self) -> None:
        """Have all ranks end."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait()


def main() -> int:
    """Run both in turn, and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--before", type=Path, metavar="CHECKOUT", help="the earlier one, with .venv; needed")
    arguments.add_argument(
        "--starts", type=int, default=10, choices=range(2, 11), metavar="N", help="how often both jobs are started"
    )
    arguments.add_argument("--pairs", type=int, default=10, help="of turns, after each start")
    arguments.add_argument("--steps", type=int, default=20, help="of each turn")
    arguments.add_argument("--serve", action="store_true", help="make steps for each line that is read: what --before runs")
    given = arguments.parse_args()
    if given.serve:
        serve(given.steps)
        return 0
    if given.before is None or not (given.before / ".venv/bin/python").exists():
        arguments.error(f"--before {given.before}: expected a checkout with .venv, in which make setup has run")
    checkouts = HERE.parent.parent, given.before.resolve()
    starts: list[list[list[float]]] = []
    for start in range(given.starts):
        turned = slice(None, None, -1 if start % 2 else 1)  # who starts first is slower, with the same code as well
        starts.append(medians([Job(checkout, given.steps) for checkout in checkouts[turned]][turned], given.pairs))
        print(f"\rstart {start + 1} of {given.starts}", end="", file=sys.stderr)
    print(file=sys.stderr)
    rows: list[Row] = []
    for index, what in enumerate(("processor", "wall")):
        now, before = ([one[which][index] for one in starts] for which in (0, 1))
        ratios = [one / other for one, other in zip(now, before, strict=True)]
        half = half_interval(ratios)
        rows.append(Row(f"{what} time of a step", median(now), median(before), "ms", given.starts))
        name = f"{what} time of a step ÷ before"
        rows.append(Row(name, fmean(ratios), None if index else BAR, "" if half is None else f"± {half:.3f}", given.starts))
    print_rows("exact steps of two replicas", rows, baseline="before, or bar", as_json=given.json)
    return int(rows[1].ours > BAR)


def medians(jobs: Sequence[Job], pairs: int) -> list[list[float]]:
    """Return the times of a step of each of two jobs, the medians over turns, and end them."""
    turns: tuple[list[list[float]], list[list[float]]] = [], []
    for pair in range(-2, pairs):  # two to warm up
        for which in (0, 1) if pair % 2 else (1, 0):
            times = jobs[which].turn()
            if pair >= 0:
                turns[which].append(times)
    for job in jobs:
        job.end()
    return [[median(column) for column in zip(*rows, strict=True)] for rows in turns]


if __name__ == "__main__":
    sys.exit(main())
