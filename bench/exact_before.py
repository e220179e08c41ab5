"""Steps of `exact` beside those of an earlier checkout: what modes of synchronisation cost a job that does not use them.

Both checkouts have an environment of their own, in which adaptra is installed from them. They take turns, in pairs. Processor
time counts, of two replicas: it varies less than the time of day on a busy machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from _ranks import run_on_ranks, small_problem
from _table import Row, parser, print_rows

import adaptra

HERE = Path(__file__).resolve()
BAR = 1.005


def measure(_rank: int, steps: int) -> list[float]:
    """Milliseconds of a step on the first of two replicas: of the processor, and of the day."""
    torch.set_num_threads(1)
    problem = small_problem(1, 8, width=384, rows=32)
    with adaptra.compile(**problem, options=adaptra.Options(adapt=False)) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)

        def run(count: int) -> None:
            for _ in range(count):
                pipe.step(*problem["example_inputs"])
                optimizer.step()
                optimizer.zero_grad()

        run(10)
        began = time.process_time(), time.monotonic()
        run(steps)
        return [
            1e3 * (now - before) / steps for now, before in zip((time.process_time(), time.monotonic()), began, strict=True)
        ]


def main() -> int:
    """Run both in turn, and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--before", type=Path, metavar="CHECKOUT", help="the earlier one, with .venv; needed")
    arguments.add_argument("--pairs", type=int, default=15)
    arguments.add_argument("--steps", type=int, default=100, help="of each run")
    arguments.add_argument("--once", action="store_true", help="of this checkout alone, as JSON")
    given = arguments.parse_args()
    if given.once:
        print(json.dumps(run_on_ranks(measure, 2, given.steps)))
        return 0
    if given.before is None or not (given.before / ".venv/bin/python").exists():
        arguments.error(f"--before {given.before}: expected a checkout with .venv, in which make setup has run")

    def run(checkout: Path) -> list[float]:
        command = [str(checkout / ".venv/bin/python"), str(HERE), "--once", "--steps", str(given.steps)]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=checkout).stdout)

    ours, earlier = list[list[float]](), list[list[float]]()
    for pair in range(given.pairs):
        turns = [(ours, HERE.parent.parent), (earlier, given.before.resolve())]
        for found, checkout in turns if pair % 2 else turns[::-1]:
            found.append(run(checkout))
        print(f"\rpair {pair + 1} of {given.pairs}", end="", file=sys.stderr)
    print(file=sys.stderr)
    rows: list[Row] = []
    for index, what in enumerate(("processor", "wall")):
        now, before = [one[index] for one in ours], [one[index] for one in earlier]
        rows.append(Row(f"{what} time of a step", median(now), median(before), "ms", given.pairs))
        ratio = median(one / other for one, other in zip(now, before, strict=True))
        rows.append(Row(f"{what} time of a step ÷ before, by pairs", ratio, BAR if index == 0 else None, "", given.pairs))
    print_rows("exact steps of two replicas", rows, baseline="before, or bar", as_json=given.json)
    return int(rows[1].ours > BAR)


if __name__ == "__main__":
    sys.exit(main())
