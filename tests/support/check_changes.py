"""Check a change in three minutes: lint, the types and the tests of what changed and of what stands on it.

What changed is what this branch and the working tree have that the base has not. The tests nearest to it run first, on all
cores. Then those of several processes run, one at a time. Of the rooms around, only tests of one process run, while there is
time. What was not begun is said at the end, and `make test` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final
from xml.etree import ElementTree

from late import NOT_BEGUN
from paths import ROOT
from selection import TEST_FILES, Chosen, Near, changed_files, choose, to_type_check

BIN: Final = Path(sys.executable).parent
ONE_PROCESS: Final = "not processes and not root and not rdma"
CXX: Final = (".cc", ".h")
SHOWN: Final = 8
"""How many files of tests are printed for one kind of reason."""


@dataclass(frozen=True, slots=True)
class Change:
    """What changed since a commit, the files of tests chosen for it, and whose types to check; None for all files."""

    base: str
    files: list[str]
    tests: list[Chosen]
    typed: list[str] | None

    @staticmethod
    def of(base: str, files: list[str]) -> Change:
        """What these files ask for."""
        return Change(base, files, choose(files), to_type_check(files))

    @staticmethod
    def since(base: str | None) -> Change:
        """What this checkout has that the base has not; see changed_files."""
        return Change.of(*changed_files(ROOT, base))


@dataclass(slots=True)
class Found:
    """What the parts of a check came to.

    Attributes:
        failed: The parts that failed.
        outcomes: How many tests passed, failed, were skipped, or were not begun.
        late: By file, how many of its tests were not begun.
    """

    failed: list[str] = field(default_factory=list[str])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    late: Counter[str] = field(default_factory=Counter[str])


def outcomes_in(report: Path) -> tuple[Counter[str], Counter[str]]:
    """How the tests of a report came out, and by file, how many were not begun."""
    outcomes, late = Counter[str](), Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcomes["failed"] += 1
        elif skipped is None:
            outcomes["passed"] += 1
        elif NOT_BEGUN in skipped.get("message", ""):
            outcomes["not begun"] += 1
            late[case.get("file", "")] += 1
        else:
            outcomes["skipped"] += 1
    return outcomes, late


def run_tests(chosen: Sequence[Chosen], marks: str, begin_before: float, cores: int, out: IO[str], found: Found) -> None:
    """Run the tests of these files that have these marks, on as many cores; none begins later than a time of the clock."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", marks, f"--begin-before={begin_before}", f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1", "--no-header"]
        if cores > 1 and len(chosen) > 1:
            # A file's tests stay together, as they may share what is dear to make, and the nearest files come first.
            command += [f"--numprocesses={cores}", "--dist=loadfile", "--no-loadscope-reorder"]
        done = subprocess.run(
            [*command, *(one.path for one in chosen)],
            cwd=ROOT,
            stdout=out,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if done.returncode not in (0, 5):  # 5: none of these files has such tests
            found.failed.append("tests")
        if report.exists():
            outcomes, late = outcomes_in(report)
            found.outcomes += outcomes
            found.late += late


def lint(changed: Sequence[str], out: IO[str], found: Found) -> None:
    """Lint everything in Python, which takes a second, and the C++ that changed."""
    commands = [[BIN / "ruff", "format", "--check", "--quiet", "."], [BIN / "ruff", "check", "--quiet", "."]]
    if cxx := [path for path in changed if path.endswith(CXX) and (ROOT / path).exists()]:
        commands.append([BIN / "clang-format", "--dry-run", "--Werror", *cxx])
    for command in commands:
        if subprocess.run(command, cwd=ROOT, stdout=out, check=False).returncode:
            found.failed.append("lint")


def has_processes(chosen: Chosen) -> bool:
    """Whether a file of tests has some that start processes."""
    return re.search(r"\bmark\.processes\b", (ROOT / chosen.path).read_text()) is not None


def check(change: Change, seconds: float, cores: int, out: IO[str]) -> Found:
    """Run lint, types and tests. No test begins so late that most would not end within these seconds."""
    begun, found = time.time(), Found()
    lint(change.files, out, found)
    chosen, typed = change.tests, change.typed
    of_processes = [one for one in chosen if one.near <= Near.IMPORTS and has_processes(one)]
    with tempfile.TemporaryFile("w+") as printed:
        types = None if typed == [] else subprocess.Popen([BIN / "pyright", *(typed or [])], cwd=ROOT, stdout=printed)
        run_tests(chosen, ONE_PROCESS, begun + seconds * (0.55 if of_processes else 0.8), cores, out, found)
        if of_processes:
            run_tests(of_processes, "processes and not root and not rdma", begun + 0.7 * seconds, 1, out, found)
        if types is not None and types.wait():
            found.failed.append("types")
            printed.seek(0)
            out.write(printed.read())
    return found


def say_choice(change: Change, out: IO[str]) -> None:
    """Print what changed, and which tests were chosen for it and why; of many for one reason, how many."""
    print(f"changed since {change.base}: {', '.join(change.files) or 'nothing'}", file=out)
    for near in Near:
        of_kind = [one for one in change.tests if one.near == near]
        for one in of_kind[:SHOWN]:
            print(f"  {one.path}  {one.why}", file=out)
        if len(of_kind) > SHOWN:
            print(f"  and {len(of_kind) - SHOWN} more files, the last of which {of_kind[-1].why}", file=out)
    print("types of " + ("all files" if change.typed is None else f"{len(change.typed)} files"), file=out, flush=True)


def left_out(change: Change) -> list[str]:
    """What `make test` runs beyond this, in sentences."""
    waiting = [one for one in change.tests if one.near > Near.IMPORTS and has_processes(one)]
    found = [f"{len(TEST_FILES) - len(change.tests)} files of tests that stand further away"]
    if waiting:
        found.append(f"the tests of several processes in {len(waiting)} files of the rooms around")
    if any(path.endswith(CXX) for path in change.files):
        found.append("the tests in C++ (make cxx)")
    if any(path.endswith(".md") or path == "mkdocs.yml" for path in change.files):
        found.append("the site and its links (make docs)")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; 0 if all that ran was green, 1 if not, 2 for a checkout or a base that git does not know."""
    parser = argparse.ArgumentParser(prog="make check", description=__doc__)
    parser.add_argument("--base", help="compare with where this branch left BASE (main)")
    parser.add_argument("--seconds", type=float, default=180.0, help="begin no test that would likely end later (180)")
    parser.add_argument(
        "--cores", type=int, default=len(os.sched_getaffinity(0)), help="how many tests run at a time (all cores)"
    )
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, all else as errors")
    given = parser.parse_args(arguments)
    out = sys.stderr if given.json else sys.stdout
    begun = time.monotonic()
    try:
        change = Change.since(given.base)
    except ValueError as error:
        print(f"make check: {error}", file=sys.stderr)
        return 2
    say_choice(change, out)
    found = Found() if given.list else check(change, given.seconds, given.cores, out)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result: dict[str, Any] = {
        "base": change.base,
        "changed": change.files,
        "chosen": [asdict(one) | {"near": one.near.name.lower()} for one in change.tests],
        "types": change.typed,
        **asdict(found),
        "left": left_out(change),
        "seconds": round(time.monotonic() - begun, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
    }
    if given.json:
        print(json.dumps(result))
    elif not given.list:
        for path, count in found.late.items():
            print(f"not begun for lack of time: {count} tests of {path}")
        print(f"left to make test: {'; '.join(result['left'])}")
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in found.outcomes.items())
        verdict = f"FAILED: {', '.join(sorted(set(found.failed)))}" if found.failed else "green"
        print(f"make check: {verdict}; tests: {outcomes}; {result['seconds']:.0f} s, {result['cpu_seconds']:.0f} s of CPU")
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main())
