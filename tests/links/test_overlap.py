"""The benchmark of hidden sums over replicas, run for a few steps. Its speed is not judged, as other processes delay it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from linked_hosts import LinkedHosts
from paths import ROOT

OVERLAP = [sys.executable, str(ROOT / "bench" / "overlap.py")]


@pytest.mark.root
def test_the_benchmark_tells_of_every_stage_what_is_hidden(linked_hosts: type[LinkedHosts]) -> None:
    few = ["--shares", "0.3", "--schedules", "1f1b", "--steps", "2", "--microbatches", "4", "--op-ms", "40"]
    done = subprocess.run([*OVERLAP, "--json", *few], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(set(row) == {"name", "ours", "baseline", "ratio", "unit", "runs"} for row in rows)
    assert [row["name"] for row in rows] == [
        f"1f1b, 30 %, stage {stage}: {what}" for stage in range(4) for what in ("hidden", "REDUCE")
    ]
    hidden, durations = rows[::2], rows[1::2]
    assert [row["baseline"] for row in durations] == [pytest.approx(30)] * 4
    assert all(row["ours"] > 25 for row in durations), "the links are no faster than stated"
    simulated = [row["baseline"] for row in hidden]
    assert simulated[0] == 0.0
    assert simulated == sorted(set(simulated)), "the later the stage, the earlier it ends"
    assert all(0.0 <= row["ours"] <= 100.0 and row["runs"] == 2 for row in hidden)
    assert hidden[3]["ours"] > hidden[0]["ours"]


@pytest.mark.parametrize("arguments", [["--replicas", "1"], ["--steps", "0"], ["--shares", "0.1", "0"]])
def test_what_cannot_be_measured_is_refused(arguments: list[str]) -> None:
    done = subprocess.run([*OVERLAP, *arguments], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "expected two replicas or more, a step or more, and shares above 0" in done.stderr
