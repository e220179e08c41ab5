"""The examples run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from paths import EXAMPLES


def run_in_four_processes(*command: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun; nothing of it is left, however it ends."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    started = subprocess.Popen([*launcher, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # torchrun ends its ranks when it is asked to, not when it is killed.
        started.terminate()
        output, errors = started.communicate()
        pytest.fail(f"not done within {timeout} s:\n{output}\n{errors}")
    return subprocess.CompletedProcess(command, started.returncode, output, errors)


@pytest.mark.processes
def test_a_gpt_trains_through_a_link_that_turns_slow(tmp_path: Path) -> None:
    """The demo, shortened: it adapts, every loss and weight is bitwise that of one process, pictures and trace are there."""
    arguments = "--steps 14 --slow-at 5 --op-ms 8 --delay-ms 40 --blocks 4 --json --output".split()
    done = run_in_four_processes(str(EXAMPLES / "train_gpt.py"), *arguments, str(tmp_path), timeout=200)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["succeeded"] and result["equal_weights"] and result["equal_losses"] == 14
    assert result["measured"]["adapted"] < result["measured"]["slow"]
    assert {"timeline.svg", "timeline.png", "trace.json", "run.svg"} <= {path.name for path in tmp_path.iterdir()}
    assert "emulated" in done.stderr
