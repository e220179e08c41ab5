"""The examples run as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run_command, under_torchrun
from paths import EXAMPLES

TRAIN = EXAMPLES / "train_gpt.py"


@pytest.mark.alone
@pytest.mark.processes
def test_a_gpt_trains_through_a_link_that_turns_slow(tmp_path: Path) -> None:
    """The demo, shortened: it adapts, every loss and weight is bitwise that of one process, pictures and trace are there."""
    arguments = "--steps 14 --slow-at 5 --op-ms 8 --delay-ms 40 --blocks 4 --json --output".split()
    done = run_command([*under_torchrun(4, TRAIN), str(TRAIN), *arguments, str(tmp_path)], timeout=200)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["succeeded"] and result["equal_weights"] and result["equal_losses"] == 14
    assert result["measured"]["adapted"] < result["measured"]["slow"]
    assert {"timeline.svg", "timeline.png", "trace.json", "run.svg"} <= {path.name for path in tmp_path.iterdir()}
    assert "emulated" in done.stderr
