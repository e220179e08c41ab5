"""The period of one pipeline on real ranks: steps in a row over gloo, of programs planned for the period and for the makespan.

Four ranks, 16 microbatches, ops padded to ``--op`` seconds. First without any delay, beside ZB-H2; then with every edge one op
late, beside the plan for the makespan. Programs take turns, ``--turns`` times. The median of the steps in a row on rank 0 is
given in units of an op, as ``bench/period.py`` simulates it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch.distributed as dist
from _ranks import run_on_ranks, small_problem
from _table import Row, parser, print_rows

import adaptra
from adaptra.frontend.planned.first_plan import first_plan
from adaptra.planning.least_memory import plan_least_memory
from adaptra.planning.planner import plan
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.program import Program
from adaptra.program.schedules import generate
from adaptra.runtime.options import Options
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

RANKS, MICROBATCHES = 4, 16


def measure(rank: int, programs: list[Program], is_late: bool, op: float, steps: int) -> list[list[float]]:
    """Seconds of each program's steps in a row, without the first one."""
    faults = [f"delay {edge}-{edge + 1} {1e3 * op:g}ms" for edge in range(RANKS - 1)] if is_late else []
    found: list[list[float]] = []
    for program in programs:
        problem = small_problem(RANKS, MICROBATCHES)
        device = adaptra.EmulatedDevice(op, op, op)
        options = adaptra.Options(adapt=False, schedule=program, emulate=device, faults=faults)
        with adaptra.compile(**problem, options=options) as pipe:
            ends: list[float] = []
            for _ in range(steps + 1):
                pipe.step(*problem["example_inputs"])
                ends.append(time.monotonic())
            found.append([after - before for before, after in pairwise(ends)])
        dist.barrier()
    return found


def rows_of(
    ours: Program, others: dict[str, Program], name: str, is_late: bool, op: float, turns: int, steps: int
) -> Iterator[Row]:
    """Each program's step, in ops, over all turns; ours beside each of the others."""
    programs = [ours, *others.values()]
    found = run_on_ranks(measure, RANKS, programs * turns, is_late, op, steps)
    periods = [
        statistics.median(seconds / op for turn in range(turns) for seconds in found[turn * len(programs) + number])
        for number in range(len(programs))
    ]
    for beside, period in zip(others, periods[1:], strict=True):
        yield Row(f"{name}, beside {beside}", periods[0], period, "ops", turns * steps)


def main() -> None:
    """Measure, and print the rows."""
    arguments = parser(__doc__)
    arguments.add_argument("--op", type=float, default=0.1, help="seconds of each F, I and W")
    arguments.add_argument("--turns", type=int, default=2, help="how often each program runs")
    arguments.add_argument("--steps", type=int, default=4, help="steps of a turn that count")
    options = arguments.parse_args()
    even = Case(CostModel.uniform(RANKS, 1, 1, 1), MICROBATCHES, tuple(range(RANKS)), "even")
    late = replace(even, cost=CostModel.uniform(RANKS, 1, 1, 1, latency=1))
    measured = options.op, options.turns, options.steps
    first = first_plan(Options(), even).program
    healthy = {"ZB-H2": generate("zb_h2", RANKS, MICROBATCHES), "the least memory by makespan": plan_least_memory(even)}
    rows = [
        *rows_of(first, healthy, "first plan, no delay", False, *measured),
        *rows_of(PERIOD.plan(late), {"the plan by makespan": plan(late)}, "every edge one op late", True, *measured),
    ]
    print_rows("the period on real ranks", rows, as_json=options.json)


if __name__ == "__main__":
    main()
