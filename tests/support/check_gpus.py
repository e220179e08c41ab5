"""Check adaptra on the GPUs of this machine: what ran, how long it took, the verdict, and what did not run and why.

One GPU is enough for ranks that share it, for the suites of tests, to look for races, and to compare bits of plans. With 2,
4 and 8 GPUs ranks train over NCCL, replicas too, and one of them is killed. One check that fails keeps no other from running.
Each runs in processes of its own. `make gpu` is this.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

from check_changes import outcomes_in
from paths import ROOT
from processes import run_processes

if TYPE_CHECKING:
    from cuda_training import Size, Trained, Training

STAGES: Final = ("train", "suites", "races", "bits", "nccl", "replicas", "kill", "pack")
SUITES: Final = "tests/fake_cuda/suites.txt"
COUNTS: Final = (2, 4, 8)
SECONDS: Final = 600.0
"""Until a check's processes are ended."""
SOON: Final = 60.0
"""Within which the ranks that are left have to name the one that was killed."""
CLOSE: Final = 1e-3
CLOSE_BY_TF32: Final = 1e-2
"""How far losses may be from those of other kernels, in parts of them."""


def machine(rank: int) -> dict[str, Any]:
    """Return what torch finds here. A process of its own asks, so that no other has a context on a GPU."""
    import torch
    from torch.cuda import nccl

    gpus = range(torch.cuda.device_count())
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if torch.version.cuda and gpus else None,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
        "free_gib": [round(torch.cuda.mem_get_info(gpu)[0] / 2**30, 1) for gpu in gpus],
    }


@dataclass(frozen=True)
class Check:
    """Something to run: it returns what it found, in words, or raises.

    Attributes:
        stage: One of STAGES.
        name: What runs.
        run: Runs it.
        gpus: How many GPUs it needs.
        not_on_the_stand_in: Why the stand-in can't show it, or None if it can.
    """

    stage: str
    name: str
    run: Callable[[], str]
    gpus: int = 1
    not_on_the_stand_in: str | None = None

    def missing(self, found: int, is_stand_in: bool) -> str | None:
        """Why it can't run here, or None if it can."""
        if is_stand_in and self.not_on_the_stand_in is not None:
            return self.not_on_the_stand_in
        return f"{found} GPU{'s' * (found != 1)} found, expected {self.gpus}" if found < self.gpus else None


@dataclass(frozen=True)
class Row:
    """What a check came to; ``text`` is all there is to say of a failure, or to print below the table."""

    stage: str
    name: str
    verdict: str
    seconds: float
    result: str
    text: str = ""


class Checks:
    """The checks, and what several of them share.

    Attributes:
        is_stand_in: Whether the stand-in takes the place of GPUs.
        as_json: Whether nothing but JSON may be printed.
        left_out: Parts of checks that did not run, as name and reason.
        below: What is printed below the table.
    """

    def __init__(self, *, is_stand_in: bool, as_json: bool) -> None:
        self.is_stand_in = is_stand_in
        self.as_json = as_json
        self.left_out: list[tuple[str, str]] = []
        self.below = ""

    @cached_property
    def machine(self) -> dict[str, Any]:
        """See :func:`machine`."""
        return run_processes(machine, 1, is_fresh=True)[0]

    def all(self) -> Iterator[Check]:
        """In the order in which they run."""
        yield Check("train", "one process, on a GPU and on the CPU", self.beside_the_cpu)
        for ranks in (2, 4):
            shared = partial(self.as_one_process, ranks, "delegate", 1)
            yield Check("train", f"{ranks} ranks share a GPU, over the delegate", shared)
        yield Check("suites", "tests marked gpu", self.marked, not_on_the_stand_in="these tests need a GPU itself")
        yield Check("suites", "suites of tests by --device=cuda", self.suites)
        yield Check("races", "2 ranks over the delegate, under torch's race sanitizer", self.races)
        yield Check("bits", "deterministic=True: a plan twice, and two plans", partial(self.bits, True))
        yield Check("bits", "without it: a plan twice, and two plans", partial(self.bits, False))
        for ranks in COUNTS:
            yield Check("nccl", f"NCCL over {ranks} ranks", partial(self.as_one_process, ranks, "nccl"), ranks)
        for ranks in COUNTS:
            name = f"2 replicas of {_count(ranks // 2, 'rank')} over NCCL"
            yield Check("replicas", name, partial(self.replicas, ranks), ranks)
        yield Check("kill", "kill -9 of one of 2 ranks, over the delegate", partial(self.kill, 2, "delegate"))
        for ranks in COUNTS:
            yield Check("kill", f"kill -9 of one of {ranks} ranks, over NCCL", partial(self.kill, ranks, "nccl"), ranks)
        yield Check("pack", "packing of messages: a table", self.pack, not_on_the_stand_in="its times say nothing of a GPU")

    # What is trained.

    @cached_property
    def size(self) -> Size:
        """Of the model: small on the stand-in, where a step is to take no second."""
        from cuda_training import Size

        return Size(2, 16) if self.is_stand_in else Size(8, 512, 256, 32)

    def training(self, stages: int, transport: str | None = None, **other: Any) -> Training:
        """A training on cuda, which gives the same bits each time unless ``other`` says otherwise."""
        from cuda_training import Training

        training = Training(self.size, stages=stages, transport=transport, deterministic=True)
        return replace(training, **other)

    def ranks(self, count: int, *trainings: Training) -> list[list[Trained]]:
        """Train in ``count`` processes; return the trainings by rank."""
        from cuda_training import train

        by_rank = run_processes(train, count, *trainings, timeout=SECONDS, is_fresh=True)
        for rank, results in enumerate(by_rank):
            for trained in results:
                assert not trained.reports, f"rank {rank}: {len(trained.reports)} faults reported: {trained.reports[0]}"
        return by_rank

    @cached_property
    def in_one_process(self) -> Trained:
        """The training that all others are compared with."""
        return self.ranks(1, self.training(2))[0][0]

    def is_close(self, trained: Trained, expected: Trained) -> str:
        """Say how far two trainings are from each other.

        Raises:
            AssertionError: Their losses are too far from each other for another order of sums to be the reason.
        """
        losses, weights = trained.distance(expected)
        close = CLOSE_BY_TF32 if self.machine["tf32"] else CLOSE
        assert losses <= close, f"losses are {losses:.1e} apart: expected at most {close}"
        return f"losses {losses:.1e} apart, weights {weights:.1e}"

    def is_bitwise(self, trained: Sequence[Trained], expected: Trained, what: str) -> str:
        """Say that losses are the same on all ranks, and the weights on the first one.

        Raises:
            AssertionError: They are not.
        """
        for rank, one in enumerate(trained):
            assert one.losses == expected.losses, f"rank {rank} has losses {one.losses}, {what} {expected.losses}"
        first = trained[0]
        assert first.is_bitwise(expected), f"not the bits of {what}: losses and weights are {first.distance(expected)} apart"
        return f"the bits of {what}"

    # The checks.

    def beside_the_cpu(self) -> str:
        on_cpu = self.ranks(1, self.training(2, device="cpu"))[0][0]
        tf32 = "on" if self.machine["tf32"] else "off"
        return f"{self.is_close(self.in_one_process, on_cpu)} (TF32 is {tf32})"

    def as_one_process(self, ranks: int, transport: str, gpus: int | None = None) -> str:
        by_rank = self.ranks(ranks, self.training(ranks, transport, gpus=gpus))
        return self.is_bitwise([results[0] for results in by_rank], self.in_one_process, "one process")

    def marked(self) -> str:
        return self.pytest("-m", "gpu", "tests")

    def suites(self) -> str:
        chosen = (
            ["tests/runtime/devices/test_device_clock.py"] if self.is_stand_in else ["-n2", "--dist=worksteal", f"@{SUITES}"]
        )
        return self.pytest("--device=cuda", "-m", "not (alone or gpu)", *chosen)

    def pytest(self, *arguments: str) -> str:
        """Run tests; return how they came out.

        Raises:
            AssertionError: Some failed.
        """
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "--no-header", "-o", "junit_family=xunit1"]
            done = subprocess.run([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
            assert report.exists(), f"pytest ended with {done.returncode}\n{done.stdout}"
            skipped = Counter(
                skip.get("message", "") for case in ElementTree.parse(report).iter("testcase") for skip in case.iter("skipped")
            )
            self.left_out += [(_count(count, "test"), reason) for reason, count in skipped.items()]
            outcomes = ", ".join(f"{count} {outcome}" for outcome, count in outcomes_in(report)[0].items())
        assert done.returncode == 0, f"{outcomes}\n{done.stdout}"
        return outcomes

    def races(self) -> str:
        from cuda_training import train_under_the_sanitizer

        with environment(TORCH_CUDA_SANITIZER="1"):
            by_rank = run_processes(train_under_the_sanitizer, 2, self.training(2, "delegate"), timeout=SECONDS, is_fresh=True)
        conflicts = [report for trained in by_rank for report in trained.reports]
        assert not conflicts, f"{_count(len(conflicts), 'conflict')}, the first of which: {conflicts[0]}"
        return f"no conflict; {self.is_bitwise(by_rank, self.in_one_process, 'one process')}"

    @cached_property
    def plans(self) -> dict[bool, list[Trained]]:
        """By whether kernels are deterministic: one plan, the same again, and another."""
        orders = ("1f1b", "1f1b", "zb_h2")
        # deterministic=True holds for the rest of a process.
        trainings = [
            self.training(2, "delegate", schedule=order, deterministic=flag) for flag in (False, True) for order in orders
        ]
        first = self.ranks(2, *trainings)[0]
        return {False: first[: len(orders)], True: first[len(orders) :]}

    def bits(self, deterministic: bool) -> str:
        once, *others = self.plans[deterministic]
        names = ("1f1b once more", "zb_h2")
        if deterministic:
            for name, trained in zip(names, others, strict=True):
                assert trained.is_bitwise(once), f"{name} gives other bits than 1f1b: {trained.distance(once)} apart"
            return self.is_bitwise([once], self.in_one_process, "one process, under each plan")
        differ = [
            f"{name}: {self.is_close(trained, once)}"
            for name, trained in zip(names, others, strict=True)
            if not trained.is_bitwise(once)
        ]
        return "; ".join(differ) or "the same bits here, which nothing promises"

    def replicas(self, ranks: int) -> str:
        trainings = [self.training(ranks // 2, transport, own_rows=True) for transport in ("nccl", "delegate")]
        by_rank = self.ranks(ranks, *trainings)
        bitwise = self.is_bitwise([over_nccl for over_nccl, _ in by_rank], by_rank[0][1], "the delegate")
        return f"{bitwise}; from one process {self.is_close(by_rank[0][0], self.in_one_process)}"

    def kill(self, ranks: int, transport: str) -> str:
        from cuda_training import lose_rank_1

        results = run_processes(
            lose_rank_1, ranks, self.training(ranks, transport), timeout=SECONDS, may_die=(1,), is_fresh=True
        )
        left = {rank: result for rank, result in enumerate(results) if rank != 1}
        for rank, (lost, text, seconds) in left.items():
            assert lost == 1, f"rank {rank} names rank {lost} as lost, expected rank 1: {text}"
            assert seconds < SOON, f"rank {rank} named rank 1 after {seconds:.1f} s: expected at most {SOON:.0f}"
        return f"named by all that are left within {max(seconds for _, _, seconds in left.values()):.2f} s"

    def pack(self) -> str:
        command = [sys.executable, ROOT / "bench" / "pack.py", *(["--json"] if self.as_json else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.below = done.stdout
        return "the bytes of torch's copies; times below"


@contextmanager
def environment(**variables: str) -> Generator[None]:
    """Give environment variables to the processes that start inside."""
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def run(check: Check) -> Row:
    """Run one check; whatever it raises is its own failure."""
    began = time.monotonic()
    try:
        verdict, result, text = "passed", check.run(), ""
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        # A rank's error says what went wrong behind its traceback, all others begin with it.
        said = text.rpartition("Traceback (most recent call last):\n")[2]
        verdict, result = "FAILED", next(line for line in said.splitlines() if not line.startswith(" "))
    return Row(check.stage, check.name, verdict, round(time.monotonic() - began, 1), result, text)


def show(machine: dict[str, Any], rows: Sequence[Row], left_out: Sequence[tuple[str, str]], below: str) -> None:
    """Print the table, what failed, what did not run and why, and other tables."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    gpus = ", ".join(f"{count} × {name}" for name, count in Counter(machine["gpus"]).items())
    table = Table(title=f"{gpus}; torch {machine['torch']}, CUDA {machine['cuda']}, NCCL {machine['nccl']}")
    for column in ("stage", "what", "verdict", "seconds", "result"):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    for row in rows:
        colour = "green" if row.verdict == "passed" else "red"
        verdict = f"[{colour}]{row.verdict}[/]"
        table.add_row(row.stage, row.name, verdict, f"{row.seconds:.1f}", escape(row.result))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for row in rows:
        if row.text:
            print(f"\nFAILED {row.name}\n{row.text}")
    print("\nDid not run:" if left_out else "\nAll of it ran.")
    for name, reason in left_out:
        print(f"  {name}: {reason}")
    print(below, end="")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; 0 if all that ran passed, 1 if one failed or there is no GPU."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="run these alone")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, all else as errors")
    parser.add_argument(
        "--stand-in",
        type=int,
        nargs="?",
        const=2,
        metavar="DEVICES",
        help="run with small numbers on the stand-in for CUDA, of so many devices (2)",
    )
    given = parser.parse_args(arguments)
    if given.stand_in is not None:
        sys.path.append(str(ROOT / "tests" / "fake_cuda"))
        from fake_cuda.building import missing
        from fake_cuda.loading import enable

        if (reason := missing()) is not None:
            print(f"make gpu --stand-in: {reason}", file=sys.stderr)
            return 1
        enable(given.stand_in)
    # Read by cuBLAS once, when a process first uses a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    checks = Checks(is_stand_in=given.stand_in is not None, as_json=given.json)
    if not (gpus := len(checks.machine["gpus"])):
        version = checks.machine["torch"]
        print(f"make gpu: torch {version} finds no CUDA device, so nothing was tested: see CONTRIBUTING.md", file=sys.stderr)
        return 1
    began = time.monotonic()
    rows: list[Row] = []
    not_run: list[tuple[str, str]] = []
    for check in checks.all():
        if check.stage not in given.stages:
            not_run.append((check.name, f"--stages {' '.join(given.stages)} leaves it out"))
        elif (reason := check.missing(gpus, checks.is_stand_in)) is not None:
            not_run.append((check.name, reason))
        else:
            print(f"make gpu: {check.name} …", file=sys.stderr, flush=True)
            rows.append(run(check))
    failed = [row.name for row in rows if row.verdict != "passed"]
    not_run += checks.left_out
    if given.json:
        found = {
            "machine": checks.machine,
            "is_stand_in": checks.is_stand_in,
            "checks": [asdict(row) for row in rows],
            "not_run": [{"name": name, "reason": reason} for name, reason in not_run],
            "pack": json.loads(checks.below or "[]"),
            "failed": failed,
            "seconds": round(time.monotonic() - began, 1),
        }
        print(json.dumps(found, indent=1))
    else:
        show(checks.machine, rows, not_run, checks.below)
        verdict = f"FAILED: {', '.join(failed)}" if failed else f"{_count(len(rows), 'check')} passed"
        print(f"make gpu: {verdict}; {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
