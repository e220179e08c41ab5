"""``make versions``: what was green is not run again, unless anything differs. Wrong arguments are refused at once."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

SCRIPT = ROOT / "bench" / "versions.py"
NAME = "python-3.11.7-torch-2.13.0-tested"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_only_what_was_green_with_the_same_files_and_tests_is_not_run_again(script: dict[str, Any], tmp_path: Path) -> None:
    found = script["Found"](NAME, "ok", "ok", "ok", 12.5, "a.log")
    record = script["Record"](tmp_path, NAME, "abc", ["tests"])
    assert record.green() is None
    record.write(found)
    assert script["Record"](tmp_path, NAME, "abc", ["tests"]).green() == found
    for commit, pytest_arguments in (("abd", ["tests"]), (None, ["tests"]), ("abc", ["tests/cli"])):
        assert script["Record"](tmp_path, NAME, commit, pytest_arguments).green() is None
    for part in ("install", "tests", "demo"):
        record.write(replace(found, **{part: "1 failed"}))
        assert record.green() is None
    script["Record"](tmp_path, NAME, None, ["tests"]).write(found)
    assert script["Record"](tmp_path, NAME, None, ["tests"]).green() is None, "files that no commit has may differ"


def test_a_run_goes_on_after_what_was_green(tmp_path: Path) -> None:
    """A whole run in a checkout of its own, of cells that were all green. A file that no commit has ends that."""
    checkout, output = tmp_path / "checkout", tmp_path / "output"
    (checkout / "bench").mkdir(parents=True)
    output.mkdir()
    shutil.copy(SCRIPT, checkout / "bench")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m a"):
        subprocess.run(["git", *command.split()], cwd=checkout, check=True)
    script = runpy.run_path(str(checkout / "bench" / SCRIPT.name))
    at = script["commit"]()
    assert at is not None
    found = [
        script["Found"](cell.name, "ok", "ok", "ok", 1.0, f"{cell.name}.log")
        for cell in script["cells"]([sys.executable], ["2.13.0"])
    ]
    for one in found:
        script["Record"](output, one.name, at, ["tests"]).write(one)
    given = ["--python", sys.executable, "--torch", "2.13.0", "--output", output, "--json", "--pytest", "tests"]
    command = [sys.executable, checkout / "bench" / SCRIPT.name, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [one["name"] for one in json.loads(done.stdout)] == [one.name for one in found]
    assert done.stderr.splitlines() == [
        f"{number} of {len(found)}: {one.name}: was green at this commit" for number, one in enumerate(found, 1)
    ]
    (checkout / "new.py").touch()
    assert script["commit"]() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--python", "python9.9"], "versions: python9.9: not found; --python takes names or paths of interpreters"),
        (["--python", sys.executable, "--only", "torch-1"], "versions: --only torch-1: expected a part of a name such as"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, *arguments, "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
