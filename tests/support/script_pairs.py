"""Pairs of scripts in ``examples/``: ``plain.py`` trains in one process, ``pipeline.py`` the same with adaptra.

Each takes ``--losses FILE`` and writes the losses of its steps there, a JSON list, from rank 0 alone.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path

from commands import in_one_process, run_command, under_torchrun
from paths import DOCS, EXAMPLES

PLAIN, PIPELINE = "plain.py", "pipeline.py"
MOST_CHANGED_LINES = 10

PAIRS = sorted(path.parent.name for path in EXAMPLES.glob(f"*/{PLAIN}"))


def page_of(pair: str) -> Path:
    """The page of the documentation that shows a pair's difference."""
    return DOCS / "first-week" / f"{pair}.md"


def difference(pair: str) -> str:
    """The difference of a pair as a unified diff."""
    plain, pipeline = (EXAMPLES / pair / name for name in (PLAIN, PIPELINE))
    before, after = (path.read_text().splitlines(keepends=True) for path in (plain, pipeline))
    return "".join(difflib.unified_diff(before, after, PLAIN, PIPELINE, n=2))


def changed_lines(pair: str) -> int:
    """The lines that only one script of a pair has."""
    lines = difference(pair).splitlines()
    return sum(line.startswith(("+", "-")) and not line.startswith(("+++", "---")) for line in lines)


def losses_of_plain(pair: str, folder: Path, *arguments: str, then: str = "") -> list[float]:
    """The losses of the script in one process. ``then`` is code that runs after it, as if the script ended with it."""
    return _run(in_one_process(EXAMPLES / pair), pair, PLAIN, folder, *arguments, then=then)


def losses_of_pipeline(pair: str, folder: Path, ranks: int, *arguments: str, then: str = "") -> list[float]:
    """The losses of the script with adaptra under torchrun; ``then`` as of :func:`losses_of_plain`."""
    launcher = under_torchrun(ranks, EXAMPLES / pair)
    return _run(launcher, pair, PIPELINE, folder, *arguments, then=then)


def _run(launcher: list[str], pair: str, script: str, folder: Path, *arguments: str, then: str = "") -> list[float]:
    """Run a script in a folder with one thread per process, and return its losses."""
    file, path = folder / f"{script}.json", EXAMPLES / pair / script
    if then:
        path = folder / script
        path.write_text((EXAMPLES / pair / script).read_text() + then)
    command = [*launcher, str(path), "--losses", str(file), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES / pair)}
    done = run_command(command, folder, environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return json.loads(file.read_text())
