"""Commands that tests run as a user would, such as scripts under torchrun."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from patience import HUNG
from warm_python import warm_commands


def in_one_process(scripts: Path) -> list[str]:
    """The beginning of a command that runs this script, or one of this folder."""
    return [str(warm_commands(scripts) / "python")]


def under_torchrun(ranks: int, scripts: Path) -> list[str]:
    """The beginning of a command that runs this script, or one of this folder, on several ranks of this machine."""
    return [str(warm_commands(scripts) / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"]


def lines_of(errors: str) -> list[str]:
    """The lines of standard error, but torch's that a host has no name: in tests no name server is asked."""
    return [line for line in errors.splitlines() if "hostname of the client socket" not in line]


def run_command(
    command: Sequence[str], folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command; nothing of it is left, however it ends."""
    started = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = started.communicate(timeout=HUNG)
    except subprocess.TimeoutExpired:
        # torchrun ends its ranks when it is asked to, not when it is killed.
        started.terminate()
        output, errors = started.communicate()
        pytest.fail(f"{command}: not done within {HUNG} s:\n{output}\n{errors}")
    return subprocess.CompletedProcess(command, started.returncode, output, errors)
