"""The benchmark of what REDUCE costs, run for a few steps. Its speed is not judged, as other processes delay it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from linked_hosts import LinkedHosts
from paths import ROOT

OVERLAP = [sys.executable, str(ROOT / "bench" / "overlap.py")]


@pytest.mark.root
def test_the_benchmark_shows_what_is_hidden_and_what_a_step_costs(linked_hosts: type[LinkedHosts]) -> None:
    few = ["--shares", "0.3", "--schedules", "1f1b", "--steps", "2", "--microbatches", "4", "--op-ms", "40"]
    done = subprocess.run([*OVERLAP, "--json", *few], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(set(row) == {"name", "ours", "baseline", "ratio", "unit", "runs"} for row in rows)
    unlimited, *of_stages, step, added, apart = rows
    assert [row["name"] for row in of_stages] == [
        f"1f1b, 30 %, stage {stage}: {what}" for stage in range(4) for what in ("hidden", "REDUCE")
    ]
    hidden, durations = of_stages[::2], of_stages[1::2]
    assert [row["baseline"] for row in durations] == [pytest.approx(30)] * 4
    assert all(row["ours"] > 25 for row in durations), "the links are no faster than stated"
    assert 0.0 < hidden[0]["ours"] < 50.0 and 0.0 < hidden[0]["baseline"] < 50.0, "stage 0 hides what leaves during its last W"
    assert all(0.0 <= row["ours"] <= 100.0 and row["runs"] == 2 for row in hidden)
    assert hidden[3]["baseline"] == 100.0, "its first message comes latest, and its last op ends first"
    assert hidden[3]["ours"] > 0.0
    assert [row["name"] for row in (unlimited, step, added, apart)] == [
        "1f1b: step without a limit",
        "1f1b, 30 %: step, beside the bound",
        "1f1b, 30 %: added to a step, beside the bar",
        "1f1b, 30 %: step, beside one without overlap",
    ]
    assert step["ours"] == apart["ours"] == pytest.approx(unlimited["ours"] + added["ours"])
    first = step["baseline"] - unlimited["ours"]
    assert added["baseline"] == pytest.approx(1.1 * first)
    assert apart["baseline"] >= step["baseline"], "the slowest sum takes as long as stage 0's at least"


@pytest.mark.parametrize("arguments", [["--replicas", "1"], ["--buckets", "0"], ["--steps", "0"], ["--shares", "0.1", "0"]])
def test_what_cannot_be_measured_is_refused(arguments: list[str]) -> None:
    done = subprocess.run([*OVERLAP, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected two replicas or more, a step or more, a bucket or more, and shares above 0" in done.stderr
