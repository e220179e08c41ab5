"""The examples run as a user runs them."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from commands import run_command, under_torchrun
from paths import EXAMPLES
from processes import run_processes

TRAIN = EXAMPLES / "train_gpt.py"
KILL = EXAMPLES / "kill_worker.py"


@pytest.mark.alone
@pytest.mark.processes
def test_a_gpt_trains_through_a_link_that_turns_slow(tmp_path: Path) -> None:
    """The demo, shortened: it adapts, every loss and weight is bitwise that of one process, pictures and trace are there."""
    arguments = "--steps 14 --slow-at 5 --op-ms 8 --delay-ms 40 --blocks 4 --json --output".split()
    done = run_command([*under_torchrun(4, TRAIN), str(TRAIN), *arguments, str(tmp_path)])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["succeeded"] and result["equal_weights"] and result["equal_losses"] == 14
    assert result["measured"]["adapted"] < result["measured"]["slow"]
    assert {"timeline.svg", "timeline.png", "trace.json", "run.svg"} <= {path.name for path in tmp_path.iterdir()}
    assert "emulated" in done.stderr


def run_kill_worker(rank: int, arguments: list[str]) -> int:
    """Run the example as one of its processes, and return its exit status."""
    sys.argv = [str(KILL), *arguments]
    sys.path.insert(0, str(EXAMPLES))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(KILL), run_name="__main__")
    return int(ended.value.code or 0)


@pytest.mark.alone
@pytest.mark.processes
def test_a_gpt_trains_on_without_a_killed_worker(tmp_path: Path) -> None:
    """The demo of a failure, shortened: three of four processes live, with the losses and weights of an undisturbed run."""
    arguments = "--steps 4 --kill-at 2 --op-ms 2 --blocks 2 --output".split()
    statuses = run_processes(run_kill_worker, 4, [*arguments, str(tmp_path)], may_die=(3,))
    assert statuses == [0, 0, 0, None]
    verdicts = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("rank-*.json")}
    assert verdicts == {"rank-0.json": True, "rank-1.json": True, "rank-2.json": True}
    assert {"timeline.svg", "trace.json"} <= {path.name for path in tmp_path.iterdir()}
