"""The claim of this project on GPUs: iteration while a link turns slow, under torch's schedules and adaptra's.

A GPT of 1.3 B parameters trains in bfloat16 on random tokens, on up to four GPUs of this machine. The link between the two
ranks in the middle is delayed, both ways, more and more. With root each rank has a network of its own, NCCL sends over
sockets, and the link itself is delayed. Without root each message over it is held by a kernel that spins on the stream that
sends, and adaptra's by its fault injection.

Every row is a training job of its own:

- torch's 1F1B and ZBVZeroBubble, over NCCL;
- adaptra with the order of 1F1B and no adapting, over NCCL: the order alone;
- adaptra that adapts its order, over NCCL: fewer bubbles;
- the same with the delegate, to which edges that turn slow move;
- some of them with one hardware queue instead of 32, under the longest delay only.

On one GPU four processes share it, and NCCL refuses that. Then adaptra's rows run over the delegate. What did not run is listed
with its reason.

Columns:

- iteration: the median of the steps from the second after the last change of plans on, at least of the last three;
- slow-down: the iteration in units of the row's own without delay;
- bound: a period that no order of stages placed straight beats, from the durations of adaptra's ops without delay;
- allocated, reserved: the most memory of a GPU in these steps, as torch's allocator of one process counts it;
- new plan: the number of steps from the change of the link until the first one under a new plan;
- gap: the longest time in a step for which the compute stream stood still while a message of its rank was under way. The next
  op's inputs were there. With one hardware queue a message that waits holds up the ops behind it;
- losses: whether the losses of all steps and microbatches have the bits of adaptra's first row.

All rows use deterministic kernels. `--stand-in` runs the same with small numbers on the stand-in for CUDA (tests/fake_cuda),
all rows in the same processes. It shows that the script works, and its times mean nothing.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from _gpu_gaps import longest_gap
from _gpu_hosts import HELD, WAYS, best_way, make_hosts
from _table import Row, parser, print_rows

ROOT: Final = Path(__file__).resolve().parent.parent
LOGS: Final = ROOT / "build" / "gpu-slow-link"
"""Where what a failed row printed is kept."""

MOST_RANKS, SHARING = 4, 4
"""Ranks on as many GPUs, and on a single one."""

SETTLING, LEAST = 2, 3
"""Steps after a change of plans that are not measured, and steps that are measured in any case."""

QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
ENVIRONMENT: Final = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
}  # fmt: skip
FULL: Final = {"blocks": 24, "width": 2048, "heads": 16, "length": 1024, "vocabulary": 16384, "rows": 1, "microbatches": 16}
SMALL: Final = {"blocks": 8, "width": 16, "heads": 2, "length": 8, "vocabulary": 32, "rows": 1, "microbatches": 4}
OF_TORCH: Final = "torch 1F1B"
FAILED: Final = "failed: "


@dataclass(frozen=True)
class Job:
    """A row.

    Attributes:
        name: For people.
        schedule: torch's class, or adaptra's first order; None for a planned one.
        transport: adaptra's; None for torch's schedules, which use NCCL.
        adapts: Whether adaptra adapts.
        delegate: Whether edges that turn slow move to the delegate.
        queues: Hardware queues of a GPU.
        delays: Seconds, one way, one after the other.
    """

    name: str
    schedule: str | None
    transport: str | None = None
    adapts: bool = False
    delegate: bool = False
    queues: int = 32
    delays: tuple[float, ...] = ()

    @property
    def needs_nccl(self) -> bool:
        """Whether each rank needs a GPU of its own."""
        return self.transport in (None, "nccl")


def jobs_of(delays: tuple[float, ...], shares: bool) -> list[Job]:
    """All rows; those over the delegate alone where ranks share a GPU."""
    ends = (delays[0], delays[-1])
    alone, full = "adaptra, 1F1B's order", "adaptra, adapted, delegate"
    jobs = [
        Job(OF_TORCH, "1F1B", delays=delays),
        Job("torch ZBV", "ZBVZeroBubble", delays=delays),
        Job(alone, "1f1b", "nccl", delays=delays),
        Job("adaptra, adapted", None, "nccl", adapts=True, delays=delays),
        Job(full, None, "nccl", adapts=True, delegate=True, delays=delays),
        Job(f"{OF_TORCH}, 1 queue", "1F1B", queues=1, delays=ends),
        Job(f"{alone}, 1 queue", "1f1b", "nccl", queues=1, delays=ends),
        Job(f"{full}, 1 queue", None, "nccl", adapts=True, delegate=True, queues=1, delays=ends),
    ]
    if shares:
        jobs += [
            Job(f"{alone}, all by the delegate", "1f1b", "delegate", delays=delays),
            Job("adaptra, adapted, all by the delegate", None, "delegate", adapts=True, delays=delays),
        ]
    return jobs


@dataclass(frozen=True)
class Cell:
    """A row under one delay; seconds and bytes. None is not known."""

    job: Job
    delay: float
    iteration: float
    slow_down: float
    bound: float | None
    allocated: int
    reserved: int
    new_plan: int | None
    gap: float
    has_equal_losses: bool | None
    steps: int


def cells_of(job: Job, ranks: list[dict[str, Any]], expected: list[Any]) -> list[Cell]:
    """What a job's ranks measured; ``expected`` is the losses of each step of adaptra's first row."""
    cells: list[Cell] = []
    losses: list[Any] = []
    bounds = ranks[0]["bounds"]
    for index, delay in enumerate(job.delays):
        each = [rank["measured"][index] for rank in ranks]
        first = each[0]
        # One before the first step, one for each, and one for the step that was watched behind them.
        versions = first.get("versions", [])[:-1]
        changes = [step for step in range(len(versions) - 1) if versions[step] != versions[step + 1]]
        seconds = first["seconds"]
        settled = seconds[min(max(0, len(seconds) - LEAST), (changes[-1] if changes else 0) + SETTLING) :]
        iteration = median(settled)
        losses += first.get("losses", [])
        cells.append(Cell(
            job, delay, iteration,
            slow_down=iteration / (cells[0].iteration if cells else iteration),
            bound=bounds[index] if bounds else None,
            allocated=max(one["allocated"] for one in each),
            reserved=max(one["reserved"] for one in each),
            new_plan=changes[0] if changes else None,
            gap=longest_gap(*([tuple(time) for one in each for time in one[what]] for what in ("ops", "arrivals"))),
            has_equal_losses=losses == expected[: len(losses)] if losses else None,
            steps=len(settled),
        ))  # fmt: skip
    return cells


@dataclass
class Outcome:
    """What came of all jobs.

    Attributes:
        cells: What was measured.
        skipped: The reasons why other rows did not run, by name.
        facts: What the first job that ran tells of GPUs and versions.
    """

    cells: list[Cell] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)


def run(launches: list[list[Job]], size: dict[str, Any], way: str, minutes: float) -> Outcome:
    """Run the jobs, those of one launch in the same processes."""
    until = time.monotonic() + 60 * minutes
    outcome = Outcome()
    expected: list[Any] = []
    for number, launch in enumerate(launches):
        jobs = [job for job in launch if size["ranks"] <= size["gpus"] or not job.needs_nccl]
        names = [job.name for job in jobs]
        shared = f"NCCL refuses two ranks on one GPU, and {size['ranks']} ranks share {size['gpus']}"
        outcome.skipped |= {job.name: shared for job in launch if job not in jobs}
        if jobs and time.monotonic() > until:
            outcome.skipped |= dict.fromkeys(names, f"no time was left of {minutes:g} minutes (--minutes)")
        elif jobs:
            print(f"{number + 1} of {len(launches)}: {'; '.join(names)}", file=sys.stderr, flush=True)
            os.environ.update(ENVIRONMENT | {QUEUES: str(jobs[0].queues)})
            rows = [asdict(job) for job in jobs]
            try:
                with make_hosts(way, size["ranks"]) as hosts:
                    ranks = hosts.call(measure, rows, size, way, timeout=until - time.monotonic(), shown=(0,))
            except (AssertionError, OSError) as error:
                outcome.skipped |= dict.fromkeys(names, reason_of(names[0], str(error), is_late=time.monotonic() > until))
                continue
            for job, *measured in zip(jobs, *(rank["rows"] for rank in ranks), strict=True):
                if job.transport is not None and not expected:
                    expected = [losses for each in measured[0]["measured"] for losses in each["losses"]]
                outcome.cells += cells_of(job, measured, expected)
            outcome.facts = outcome.facts or [*sorted({rank["gpu"] for rank in ranks}), *ranks[0]["facts"]]
    return outcome


def measure(rank: int, rows: list[dict[str, Any]], size: dict[str, Any], way: str) -> dict[str, Any]:
    """One rank of a launch."""
    from _gpu_rows import train

    return train(rank, rows, size, way)


def reason_of(name: str, text: str, *, is_late: bool) -> str:
    """Why a row did not end, from what its ranks printed, all of which is kept."""
    if is_late:
        return "the time (--minutes) ended before it did"
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{re.sub('[^a-zA-Z0-9]+', '-', name)}.log"
    log.write_text(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]*Error", line)), lines[-1])
    return f"{FAILED}{first}; all that it printed is in {log.relative_to(ROOT)}"


def bounds_of(cells: list[Cell]) -> dict[float, float]:
    """The lowest bound under each delay that the ops of a row tell."""
    bounds: dict[float, float] = {}
    for cell in cells:
        if cell.bound is not None:
            bounds[cell.delay] = min(cell.bound, bounds.get(cell.delay, math.inf))
    return bounds


def rows_of(cells: list[Cell]) -> list[Row]:
    """The cells as rows that other benchmarks print too. The baseline of each is torch's 1F1B under the same delay."""
    bounds, rows = bounds_of(cells), []
    beside = {cell.delay: cell for cell in cells if cell.job.name == OF_TORCH}
    for cell in cells:
        label, other, bound = f"{1e3 * cell.delay:g} ms: {cell.job.name}", beside.get(cell.delay), bounds.get(cell.delay)
        iteration = 1e3 * cell.iteration
        rows += [
            Row(f"{label}; iteration", iteration, other and 1e3 * other.iteration, "ms", cell.steps),
            Row(f"{label}; slow-down", cell.slow_down, other and other.slow_down, "×", cell.steps),
            Row(f"{label}; allocated", cell.allocated / 2**20, other and other.allocated / 2**20, "MiB", 1),
            Row(f"{label}; reserved", cell.reserved / 2**20, other and other.reserved / 2**20, "MiB", 1),
            Row(f"{label}; longest gap behind a send", 1e3 * cell.gap, other and 1e3 * other.gap, "ms", 1),
        ]
        if bound is not None and has_bound(cell.job):
            rows.append(Row(f"{label}; bound", iteration, 1e3 * bound, "ms", cell.steps))
        if cell.new_plan is not None:
            rows.append(Row(f"{label}; steps until the new plan, bar 3", cell.new_plan, 3, "steps", 1))
        if cell.has_equal_losses is not None:
            rows.append(Row(f"{label}; losses have other bits, bar 0", int(not cell.has_equal_losses), 0, "", 1))
    return rows


def has_bound(job: Job) -> bool:
    """Whether the bound of stages placed straight says something of a row."""
    return job.schedule != "ZBVZeroBubble"


def print_table(title: str, cells: list[Cell]) -> None:
    """Print the cells for people, a line each."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption="iteration, bound and gap in ms; memory in MiB")
    table.add_column("delay")
    table.add_column("row")
    for column in "iteration,slow-down,bound,allocated,reserved,new plan,gap,losses,steps".split(","):
        table.add_column(column, justify="right")
    bounds = bounds_of(cells)
    for cell in sorted(cells, key=lambda cell: cell.delay):
        bound = bounds.get(cell.delay) if has_bound(cell.job) else None
        table.add_row(
            f"{1e3 * cell.delay:g} ms", cell.job.name, f"{1e3 * cell.iteration:,.0f}", f"{cell.slow_down:.2f}×",
            "–" if bound is None else f"{1e3 * bound:,.0f}", f"{cell.allocated / 2**20:,.0f}", f"{cell.reserved / 2**20:,.0f}",
            "–" if cell.new_plan is None else str(cell.new_plan), f"{1e3 * cell.gap:,.1f}",
            {None: "–", True: "equal", False: "DIFFER"}[cell.has_equal_losses], str(cell.steps),
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def driver() -> str:
    """The version of the driver, as its own tool tells it."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def read_arguments() -> Namespace:
    """The command line."""
    arguments = parser(__doc__)
    arguments.add_argument("--delays", type=float, nargs="+", default=[15, 30, 60], help="one way, milliseconds, beside 0")
    arguments.add_argument("--steps", type=int, default=20, help="of each row under each delay")
    arguments.add_argument("--minutes", type=float, default=10, help="rows that have not begun by then are left out")
    arguments.add_argument("--gpus", type=int, help="use the first so many only")
    arguments.add_argument("--ranks", type=int, help="as many as GPUs, at most four; on one GPU four share it")
    arguments.add_argument("--links", type=int, default=1, help="so many links turn slow at once, those in the middle first")
    arguments.add_argument("--only", nargs="+", help="these rows, by their names in the table")
    arguments.add_argument("--memory", type=int, help="most microbatches in flight of adaptra's plans; else what is free")
    arguments.add_argument("--held", action="store_true", help="hold messages as without root")
    arguments.add_argument("--stand-in", action="store_true", help="on the stand-in for CUDA, with small numbers")
    for name, value in FULL.items():
        arguments.add_argument(f"--{name}", type=int, help=f"of the model or the batch: {value}, on the stand-in {SMALL[name]}")
    return arguments.parse_args()


def count_gpus(arguments: Namespace) -> int:
    """Return how many GPUs to use, or end in words where there is none."""
    most = arguments.gpus or MOST_RANKS
    if arguments.stand_in:
        sys.path.append(str(ROOT / "tests" / "fake_cuda"))
        from fake_cuda.building import missing
        from fake_cuda.loading import enable

        if (reason := missing()) is not None:
            raise SystemExit(f"gpu_slow_link: {reason}")
        enable(most)
        return most
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            f"gpu_slow_link: torch {torch.__version__} finds no CUDA device, so nothing was measured: see CONTRIBUTING.md"
        )
    return min(torch.cuda.device_count(), most)


def main() -> int:
    """Run all rows and print the table, or say why nothing can run. The status is 1 if a row failed, or if losses differ."""
    arguments = read_arguments()
    gpus = min(count_gpus(arguments), MOST_RANKS)
    ranks = arguments.ranks or (SHARING if gpus == 1 else gpus)
    usual = SMALL if arguments.stand_in else FULL
    size: dict[str, Any] = {name: getattr(arguments, name) or value for name, value in usual.items()}
    if not 1 <= arguments.links < ranks:
        raise SystemExit(f"gpu_slow_link: --links {arguments.links}: expected 1 to {ranks - 1}, as {ranks} ranks have")
    middle = (ranks - 1) // 2
    slow = [(rank, rank + 1) for rank in sorted(range(ranks - 1), key=lambda rank: abs(rank - middle))[: arguments.links]]
    size |= {"gpus": gpus, "ranks": ranks, "slow": slow, "steps": arguments.steps, "memory": arguments.memory}
    delays = (0.0, *sorted(delay / 1e3 for delay in arguments.delays if delay > 0))
    jobs = jobs_of(delays, ranks > gpus)
    names = [job.name for job in jobs]
    if unknown := {*(arguments.only or [])} - {*names}:
        raise SystemExit(f"gpu_slow_link: --only {', '.join(sorted(unknown))}: expected some of {'; '.join(names)}")
    jobs = [job for job in jobs if not arguments.only or job.name in arguments.only]
    way = HELD if arguments.held else best_way()
    outcome = run([jobs] if arguments.stand_in else [[job] for job in jobs], size, way, arguments.minutes)
    where = sys.stderr if arguments.json else sys.stdout
    links = f"link{'s' * (len(slow) > 1)} {', '.join(f'{low}-{high}' for low, high in sorted(slow))}"
    title = f"{ranks} stages on {gpus} GPU{'s' * (gpus > 1)}, {links} delayed one way"
    print(f"{'; '.join(outcome.facts)}; driver {driver()}\ndelays: {WAYS[way]}", file=where)
    if arguments.stand_in:
        print("on the stand-in for CUDA: the times mean nothing", file=where)
    if arguments.json:
        print_rows(title, rows_of(outcome.cells), as_json=True)
    else:
        print_table(title, outcome.cells)
    print("did not run:" if outcome.skipped else "all rows ran", file=where)
    for name, reason in outcome.skipped.items():
        print(f"- {name}: {reason}", file=where)
    has_failed = any(reason.startswith(FAILED) for reason in outcome.skipped.values())
    return int(has_failed or any(cell.has_equal_losses is False for cell in outcome.cells))


if __name__ == "__main__":
    sys.exit(main())
