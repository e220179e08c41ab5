"""Run the unit tests and the demo with every pair of a Python and a torch, and print which pairs are green.

For each pair it makes a virtual environment and installs adaptra there as a user would. All versions but torch's are those that
``constraints/`` pins. Then it runs pytest and the demo. What either writes is kept in a file that the table names. An
environment takes up to 6 GB, so it is removed before the next is made. The lowest Python and torch are also run with the lowest
versions of all packages.

A run that was stopped goes on: what was green at the same commit is not run again. That needs a checkout without changes.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints"
DEMO = ["--steps", "16", "--slow-at", "6"]


@dataclass(frozen=True)
class Cell:
    """What is run together.

    Attributes:
        python: An interpreter.
        torch: A release of torch.
        constraints: A file of ``constraints/`` that pins all else.
    """

    python: str
    torch: str
    constraints: str

    @property
    def name(self) -> str:
        """For files and for people."""
        version = subprocess.run([self.python, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
        return f"python-{version}-torch-{self.torch}-{self.constraints.removesuffix('.txt')}"


@dataclass(frozen=True)
class Found:
    """How one cell went: each part is ``ok`` or says what failed. ``log`` is the file with all that was written."""

    name: str
    install: str
    tests: str
    demo: str
    minutes: float
    log: str

    @property
    def is_green(self) -> bool:
        """Whether everything ran and passed."""
        return self.install == self.tests == self.demo == "ok"


def cells(pythons: Sequence[str], torches: Sequence[str]) -> list[Cell]:
    """Every pair, and the lowest of all."""
    made = [Cell(python, torch, "tested.txt") for python in pythons for torch in torches]
    return [*made, Cell(pythons[0], torches[0], "lowest.txt")]


def commit() -> str | None:
    """The commit that is checked out, or None if the files differ from it or this is no checkout."""

    def git(*command: str) -> str | None:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    return git("rev-parse", "HEAD") if git("status", "--porcelain") == "" else None


class Record:
    """How a cell went, in a file beside its log, with the commit and pytest's arguments that it is true for."""

    def __init__(self, folder: Path, name: str, commit: str | None, pytest: Sequence[str]) -> None:
        self._path = folder / f"{name}.json"
        self._of = {"commit": commit, "pytest": list(pytest)}

    def green(self) -> Found | None:
        """The cell as it was run before, if that was with the same files and tests, and green."""
        if self._of["commit"] is None or not self._path.exists():
            return None
        written = json.loads(self._path.read_text())
        found = Found(**written["found"])
        return found if written["of"] == self._of and found.is_green else None

    def write(self, found: Found) -> None:
        """Keep how the cell went."""
        self._path.write_text(json.dumps({"of": self._of, "found": asdict(found)}, indent=1) + "\n")


def tell(text: str) -> None:
    """Say how far the run is, on standard error: standard output is for the results."""
    print(text, file=sys.stderr, flush=True)


def run_cell(cell: Cell, name: str, folder: Path, pytest: Sequence[str], *, keep: bool) -> Found:
    """Install, test and demonstrate one cell; stops at a failed installation."""
    started = time.monotonic()
    place, log = folder / name, folder / f"{name}.log"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    pins = [line for line in (CONSTRAINTS / cell.constraints).read_text().splitlines() if not line.startswith("torch==")]
    constraints = place / "constraints.txt"
    constraints.write_text("\n".join([*pins, f"torch=={cell.torch}", ""]))
    python = place / "venv" / "bin" / "python"

    def run(*command: str | Path) -> tuple[bool, str]:
        with log.open("a") as file:
            file.write(f"$ {' '.join(map(str, command))}\n")
            file.flush()
            done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
        lines = log.read_text(errors="replace").rstrip().splitlines()
        return done.returncode == 0, lines[-1] if lines else ""

    def shown(outcome: tuple[bool, str]) -> str:
        return "ok" if outcome[0] else f"failed: {outcome[1][-80:]}"

    def told(part: str, result: str) -> str:
        tell(f"  {part}: {result}, {(time.monotonic() - started) / 60:.0f} min after the start")
        return result

    log.unlink(missing_ok=True)
    tell(f"  all that is written goes to {log}")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--constraint", constraints]
    outcome = run(cell.python, "-m", "venv", place / "venv")
    for wanted in (f"torch=={cell.torch}", f"{ROOT}[test]"):
        outcome = run(*pip, wanted) if outcome[0] else outcome
    install = told("install", shown(outcome))
    tests = demo = "not run"
    if install == "ok":
        passed, _ = run(python, "-m", "pytest", "-q", "--tb=short", *pytest)
        failed = len(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.MULTILINE)))
        tests = told("tests", "ok" if passed else f"{failed} failed" if failed else "stopped: see the log")
        output = place / "demo"
        command = ["-m", "torch.distributed.run", "--nproc-per-node=4", "examples/train_gpt.py", *DEMO, "--output", output]
        demo = told("demo", shown(run(python, *command)))
    if not keep:
        shutil.rmtree(place)
    return Found(name, install, tests, demo, (time.monotonic() - started) / 60, str(log))


def main() -> int:
    """Run the cells one after the other. The exit status is 1 if one is not green, and 2 if an argument is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=["python3.11", "python3.12", "python3.13"], help="names or paths")
    parser.add_argument("--torch", nargs="+", default=["2.11.0", "2.13.0", "2.15.0"], help="releases, the lowest first")
    parser.add_argument("--only", default="", help="run the cells whose name contains this")
    parser.add_argument("--again", action="store_true", help="run what was green at this commit too")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "versions", help="folder of environments and logs")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument(
        "--pytest", nargs=argparse.REMAINDER, default=["-m", "not processes and not root and not rdma", "tests"],
        help="what pytest gets, up to the end of the line; by default all tests of one process",
    )  # fmt: skip
    given = parser.parse_args()
    pythons = [shutil.which(python) for python in given.python]
    if missing := [name for name, path in zip(given.python, pythons, strict=True) if path is None]:
        tell(f"versions: {', '.join(missing)}: not found; --python takes names or paths of interpreters")
        return 2
    chosen = [(cell, cell.name) for cell in cells([path for path in pythons if path is not None], given.torch)]
    chosen = [(cell, name) for cell, name in chosen if given.only in name]
    if not chosen:
        tell(f"versions: --only {given.only}: expected a part of a name such as python-3.11.7-torch-2.13.0-tested")
        return 2
    folder, at = given.output.resolve(), commit()
    if at is None:
        tell("versions: files differ from the commit, so all cells are run, and a later run repeats them")
    found: list[Found] = []
    for number, (cell, name) in enumerate(chosen, 1):
        record = Record(folder, name, at, given.pytest)
        if (before := None if given.again else record.green()) is not None:
            tell(f"{number} of {len(chosen)}: {name}: was green at this commit")
        else:
            tell(f"{number} of {len(chosen)}: {name} …")
            before = run_cell(cell, name, folder, given.pytest, keep=given.keep)
            record.write(before)
        found.append(before)
    if given.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table(title="adaptra with each Python and torch")
        for column in ("what", "install", "tests", "demo", "minutes", "log"):
            table.add_column(column)
        for one in found:
            table.add_row(one.name, one.install, one.tests, one.demo, f"{one.minutes:.0f}", one.log)
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0 if all(one.is_green for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
