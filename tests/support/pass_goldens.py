"""Golden tests of passes: small text files with a command, a program, and what the command prints or refuses.

A file ``tests/golden/passes/PASS/NAME.test`` holds a program as ``adaptra opt`` reads it. Its comments are the test::

    # adaptra opt 'insert-comm{receives=late}' program.sched --case case.json
    # case.json: {"S": 2, "M": 1, "t_f": 1, "t_b": 1, "t_w": 1}
    # What this shows.
    schedule x placement=0,1 microbatches=1
    0: 0F0 0B0
    1: 1F0 1B0

    # prints, makespan 8 after 8
    schedule x placement=0,1 microbatches=1
    …

The command runs in a folder with two files. ``program.sched`` is all above the empty line, so that the lines of an error are
those of the test's file. ``case.json`` is what its comment says. Below stands what was printed, with the makespans under a case
of one pipeline. Or there is ``# refuses`` and what standard error said.

For a new test write what is above the empty line, run ``pytest --accept-golden tests/passes/test_goldens.py``, and read the
rest.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from paths import GOLDEN

from adaptra.cli import main
from adaptra.program import Program
from adaptra.simulation.case_files import load_case
from adaptra.simulation.simulate import simulate

FOLDER = GOLDEN / "passes"


@dataclass(frozen=True)
class PassGolden:
    """A golden test of passes.

    Attributes:
        path: The file.
        program: What stands above the empty line.
    """

    path: Path
    program: str

    @staticmethod
    def read(path: Path) -> PassGolden:
        """Read a file, whether or not it already says what the command prints."""
        above, _, _ = path.read_text().partition("\n\n# ")
        return PassGolden(path, above.rstrip("\n") + "\n")

    @property
    def command(self) -> list[str]:
        """The words of the command."""
        first = self.program.splitlines()[0]
        words = shlex.split(first.removeprefix("# "))
        assert words[:2] == ["adaptra", "opt"], f"{self.path}: {first!r}: expected # adaptra opt PASSES program.sched"
        return words

    @property
    def passes(self) -> str:
        """The passes, as the command has them."""
        return self.command[2]

    @property
    def case(self) -> str | None:
        """The text of ``case.json``, if there is one."""
        found = re.search(r"^# case\.json: (.*)$", self.program, re.MULTILINE)
        return None if found is None else found[1]

    def run(self) -> str:
        """Run the command in the current folder, and return what the whole file should be."""
        Path("program.sched").write_text(self.program)
        if self.case is not None:
            Path("case.json").write_text(self.case)
        printed, refused = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(refused):
            status = main(self.command[1:])
        outcome = "refuses" if status else f"prints{self._makespans(printed.getvalue())}"
        return f"{self.program}\n# {outcome}\n{refused.getvalue() if status else printed.getvalue()}"

    def _makespans(self, printed: str) -> str:
        if self.case is None or "P" in json.loads(self.case):
            return ""
        cost = load_case("case.json").cost
        before, after = (simulate(Program.parse(text), cost).makespan for text in (self.program, printed))
        return f", makespan {after:g} after {before:g}"


FILES = sorted(FOLDER.rglob("*.test"))
