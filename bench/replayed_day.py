"""A day of a large job that loses processes and goes on: the work done beside that of a day without faults.

Failures come at random with the published mean time between two: 7.9 hours at 1,024 GPUs. A step takes 8.1 s, as in the
published comparison of 3,000 steps in 405 minutes. The grid is ours: 128 replicas of 8 stages with 64 microbatches. The fewer
microbatches, the more a step takes without a process, as none can be split. A step's time with losses is simulated from the
plan that the planner makes for them. Lost processes stay lost: no process can join a running job. Each new day begins whole, as
after a restart from a checkpoint.

What a recovery takes is measured by ``bench/survival.py`` on this machine, at a few processes. Give the rows that its
``--json`` printed, or it runs first. The longest kill counts for all. The time of the plan itself is added, as the job of 1,024
plans longer. A failure comes at a random point of a step, and what was done of that step is done again. What ``survive`` costs
a healthy step is the simulated wait for all, and the measured rest. Large trainings clip gradients, and so wait for all without
it, too. With ``--no-clip`` they don't.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from argparse import BooleanOptionalAction
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from _table import Row, parser, print_rows

from adaptra.planning.routes.job_planner import plan_job
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

DAY = 24 * 3600.0
BAR = 0.985
UPDATE = 3
"""Forwards that the optimizer's step takes as long as."""
HEALTHY, LONGEST = "step that clips, with survive beside without", "one killed: longest"
"""Rows of bench/survival.py."""


@dataclass(slots=True)
class Day:
    """Seconds of a day by what they went to. Their sum is the day."""

    work: float = 0.0
    recovery: float = 0.0
    redone: float = 0.0
    healthy_cost: float = 0.0
    slower_steps: float = 0.0


class Steps:
    """Times of a job's steps, simulated from the plans for what is lost.

    Args:
        case: The job, whole and without ``survive``.
        step_seconds: What its step takes.
        rest: Seconds that ``survive`` costs beside the wait for all.
        budget: Seconds to improve a plan.
    """

    def __init__(self, case: Case, step_seconds: float, rest: float, budget: float) -> None:
        self._case = replace(case, barrier=True)
        self._rest = rest
        self._budget = budget
        self._unit = step_seconds / self._period(case)
        self.plain = step_seconds
        self.whole = self.with_lost(frozenset())[0]

    def with_lost(self, lost: frozenset[int]) -> tuple[float, float]:
        """Return the seconds of a step without these workers, and those that its plan took."""
        began = time.perf_counter()
        period = self._period(replace(self._case, lost=lost))
        return period * self._unit + self._rest, time.perf_counter() - began

    def _period(self, case: Case) -> float:
        return simulate(plan_job(case, budget=self._budget), case).period


def replay(steps: Steps, workers: int, between: float, recovery: float, at_once: int, dice: random.Random) -> tuple[Day, int]:
    """One day, and its failures."""
    day, lost, failures = Day(), frozenset[int](), 0
    now, step, failure = 0.0, steps.whole, dice.expovariate(1 / between)
    while now < DAY:
        done = (min(failure, DAY) - now) / step
        if failure < DAY:
            day.redone += done % 1 * step
            done //= 1
        day.work += done * steps.plain
        day.healthy_cost += done * (steps.whole - steps.plain)
        day.slower_steps += done * (step - steps.whole)
        if failure >= DAY:
            break
        now, failures = failure, failures + 1
        first = dice.randrange(workers)
        lost |= {(first + number) % workers for number in range(at_once)}
        step, planning = steps.with_lost(lost)
        day.recovery += min(recovery + planning, DAY - now)
        now += recovery + planning
        failure = now + dice.expovariate(1 / between)
    if abs(sum(astuple(day)) - DAY) > 1e-3:
        raise AssertionError(f"the parts of a day are not a day: {day}")
    return day, failures


def survival_rows(path: str | None, kills: int) -> dict[str, dict[str, Any]]:
    """The rows of bench/survival.py by name, from a file or from a run."""
    if path is not None:
        text = Path(path).read_text()
    else:
        beside = Path(__file__).resolve().parent / "survival.py"
        command = [sys.executable, str(beside), "--json", "--breaks", "0", "--kills", str(kills)]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = {row["name"]: row for row in json.loads(text)}
    if missing := [name for name in (HEALTHY, LONGEST) if name not in rows]:
        raise SystemExit(f"{path}: no row {missing[0]!r}: expected what bench/survival.py --json prints, with kills")
    return rows


def main() -> int:
    """Replay the days and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--times", metavar="FILE", help="rows of bench/survival.py --json; without it, it runs first")
    arguments.add_argument("--kills", type=int, default=5, help="processes that are killed where it runs first")
    arguments.add_argument("--replicas", type=int, default=128)
    arguments.add_argument("--stages", type=int, default=8)
    arguments.add_argument("--microbatches", type=int, default=64)
    arguments.add_argument("--hours", type=float, default=7.9, help="mean time between failures of the job")
    arguments.add_argument("--step-seconds", type=float, default=8.1, help="a step without faults and without survive")
    arguments.add_argument("--at-once", type=int, default=1, help="neighbouring workers that a failure takes")
    arguments.add_argument("--clip", action=BooleanOptionalAction, default=True, help="training clips gradients")
    arguments.add_argument("--days", type=int, default=10)
    arguments.add_argument("--budget", type=float, default=1.0, help="seconds per plan")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    rows = survival_rows(given.times, given.kills)
    recovery, rest = rows[LONGEST]["ours"], max(0.0, rows[HEALTHY]["ours"] - rows[HEALTHY]["baseline"]) / 1e3
    pipeline = Case(CostModel.uniform(given.stages, 1, 1, 1), given.microbatches, tuple(range(given.stages)))
    case = replace(pipeline.of_replicas(given.replicas, float(UPDATE)), hands_over=False, barrier=given.clip)
    case = replace(case, memory=(2 * given.stages,) * given.stages)
    steps, dice = Steps(case, given.step_seconds, rest, given.budget), random.Random(given.seed)
    replayed = [replay(steps, case.workers, given.hours * 3600, recovery, given.at_once, dice) for _ in range(given.days)]
    days = [day for day, _ in replayed]
    title = f"{case.workers} processes, {given.replicas} replicas of {given.stages} stages, a failure each {given.hours:g} h"
    shown = [
        Row("work done ÷ fault-free", fmean(day.work for day in days) / DAY, BAR, "", given.days),
        Row("the same, worst day", min(day.work for day in days) / DAY, None, "", given.days),
        Row("failures a day", fmean(failures for _, failures in replayed), 24 / given.hours, "", given.days),
        Row("lost to recovery", fmean(day.recovery for day in days), None, "s a day", given.days),
        Row("lost to redone work", fmean(day.redone for day in days), None, "s a day", given.days),
        Row("lost to healthy cost", fmean(day.healthy_cost for day in days), None, "s a day", given.days),
        Row("lost to slower steps", fmean(day.slower_steps for day in days), None, "s a day", given.days),
        Row("a recovery, as measured", recovery, 1.5, "s", rows[LONGEST]["runs"]),
        Row("a healthy step, with survive beside without", steps.whole, steps.plain, "s", 1),
    ]
    print_rows(title, shown, baseline="bar, or published", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
