"""What the README shows runs as it stands there, without a close or a guard that it does not show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented import Page
from paths import ROOT

README = (ROOT / "README.md").read_text()
SNIPPET = Page.read(ROOT / "README.md").program


def run(command: list[str], tmp_path: Path) -> str:
    script = tmp_path / "snippet.py"
    script.write_text(SNIPPET)
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_ten_lines_run_in_one_process(tmp_path: Path) -> None:
    printed = run([sys.executable], tmp_path)
    assert printed.startswith("tensor(")
    assert "4 stages, 16 microbatches" in printed


@pytest.mark.processes
def test_the_ten_lines_run_under_torchrun_with_the_same_loss_on_every_rank(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    alone = run([sys.executable], tmp_path)
    printed = run(launcher, tmp_path)
    losses = re.findall(r"tensor\([^)]*\)", printed)
    assert losses == re.findall(r"tensor\([^)]*\)", alone) * 4
    assert printed.count("4 stages, 16 microbatches") == 1, "one table for all ranks"


def test_the_commands_it_names_are_targets_and_files() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    named = re.findall(r"python (bench/\w+\.py)", README) + re.findall(r"\]\((?!http)([^)]+)\)", README)
    for path in named:
        assert (ROOT / path).exists(), path
