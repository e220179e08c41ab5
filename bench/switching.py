"""What a switch of plans costs the steps around it, over hundreds of switches.

Ranks over gloo with emulated devices. The coordinator is asked every few steps for the other of two plans of equal time. So
plans are proposed, prepared, confirmed and switched while training runs. In the same processes, in turn, a pipeline whose
control plane is at rest runs as many steps: the baseline. A step's time is that of the slowest rank.

The first rows are the first steps under a new plan. The next are all steps of that pipeline, in which plans are proposed,
prepared and confirmed. The last are steps of the other pipeline while its first rank plans in the background, one plan after
the other.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run_on_ranks, small_problem
from _table import Row, parser, print_rows

import adaptra
from adaptra.planning.planner import plan
from adaptra.program import Program
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

BLOCK = 40
"""Steps of one pipeline before the other has its turn."""

EVERY = 3
"""Steps between two requests for the other plan."""


def alternatives(ranks: int, microbatches: int) -> tuple[Program, Program]:
    """Two orders of equal predicted time: whether the last rank's first W comes one op later, nobody waits for it."""
    first = adaptra.generate("1f1b", ranks, microbatches)
    last = list(first.orders[-1])
    at = next(i for i in range(len(last) - 2) if last[i].kind.value == "W" and last[i + 1].kind.value == "F")
    last[at], last[at + 1] = last[at + 1], last[at]
    return first, Program.of_pipeline("1f1b_late_w", first.placement, microbatches, (*first.orders[:-1], tuple(last)))


@contextmanager
def planning(rank: int, case: Case) -> Generator[None, None, None]:
    """Let the first rank plan all the time, on a thread of its own as the coordinator does."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            plan(case)

    thread = threading.Thread(target=work)
    if rank == 0:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if rank == 0:
            thread.join()


class Timed:
    """Times the steps of one pipeline, and what the plan of each was."""

    def __init__(self, pipe: adaptra.Pipeline, batch: Any) -> None:
        self._pipe = pipe
        self._batch = batch
        assert pipe._session is not None
        self._controller = pipe._session.workers[0].controller
        self.seconds: list[float] = []
        self.versions: list[int] = []

    def step(self) -> None:
        """One step, begun by all ranks together."""
        dist.barrier()
        started = time.perf_counter()
        self._pipe.step(*self._batch)
        self.seconds.append(time.perf_counter() - started)
        self.versions.append(self._pipe.plan.version)

    def suggest_other(self, programs: tuple[Program, Program]) -> None:
        """Ask for the program that does not run; the coordinator's rank proposes it when it is between two rounds."""
        running = self._pipe.plan.program.name
        self._controller.suggest(next(program for program in programs if program.name != running), "switching bench")

    @property
    def slowest(self) -> list[float]:
        """Per step, the time of the slowest rank; all ranks call it."""
        times = torch.tensor(self.seconds, dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return times.tolist()


def measure(rank: int, programs: tuple[Program, Program], switches: int, seconds: float) -> dict[str, Any]:
    """One rank: blocks of both pipelines in turn until there were enough switches."""
    problem = small_problem(programs[0].ranks, programs[0].microbatches)
    device = adaptra.EmulatedDevice(seconds, seconds, seconds)
    options = adaptra.Options(adapt=False, schedule=programs[0], emulate=device)
    batch = problem["example_inputs"]
    case = Case(CostModel.uniform(8, seconds, seconds, seconds, latency=3 * seconds), 32, tuple(range(8)))
    with adaptra.compile(**problem, options=options) as ours, adaptra.compile(**problem, options=options) as theirs:
        for pipe in (ours, theirs):
            Timed(pipe, batch).step()  # what the first step of a process costs is not asked here
        switching, resting, beside = Timed(ours, batch), Timed(theirs, batch), Timed(theirs, batch)
        while ours.plan.version < switches:
            for step in range(BLOCK):
                if step % EVERY == 0:
                    switching.suggest_other(programs)
                switching.step()
            for _ in range(BLOCK):
                resting.step()
            with planning(rank, case):
                for _ in range(BLOCK):
                    beside.step()
        found: dict[str, Any] = {"switching": switching.slowest, "resting": resting.slowest, "beside": beside.slowest}
        found["versions"] = switching.versions
        dist.barrier()
    return found


def rows_of(name: str, ours: list[float], baseline: list[float]) -> list[Row]:
    """Median, p90 and p99 of both, milliseconds."""
    percentiles = {"p50": 49, "p90": 89, "p99": 98}
    mine, theirs = quantiles(ours, n=100), quantiles(baseline, n=100)
    return [Row(f"{name}, {label}", 1e3 * mine[at], 1e3 * theirs[at], "ms", len(ours)) for label, at in percentiles.items()]


def main() -> int:
    """Start the ranks and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--microbatches", type=int, default=4)
    arguments.add_argument("--op-ms", type=float, default=4.0, help="duration of every emulated op, milliseconds")
    arguments.add_argument("--switches", type=int, default=500)
    given = arguments.parse_args()
    programs = alternatives(given.ranks, given.microbatches)
    found = run_on_ranks(measure, given.ranks, programs, given.switches, given.op_ms / 1e3)
    versions, seconds = found["versions"], found["switching"]
    first = [now for now, was, is_ in zip(seconds[1:], versions, versions[1:], strict=False) if is_ != was]
    rows = rows_of("first step under a new plan", first, found["resting"])
    rows += rows_of("all steps while plans are proposed", seconds, found["resting"])
    rows += rows_of("steps beside planning for 8 stages, 32 microbatches", found["beside"], found["resting"])
    title = f"{given.ranks} ranks, {given.microbatches} microbatches, {given.op_ms:g} ms ops, {len(first)} switches"
    print_rows(title, rows, baseline="at rest", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
