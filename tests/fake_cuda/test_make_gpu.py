"""`make gpu` on the stand-in: its cheapest checks as a person runs them, and what its other parts must find."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from paths import ROOT
from processes import run_processes

SOON = 200.0


def test_the_script_runs_and_says_what_did_not() -> None:
    command = [sys.executable, ROOT / "tests/support/check_gpus.py", "--stand-in", "1", "--json", "--stages", "suites", "kill"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    suites, killed = result["checks"]
    assert (suites["name"], suites["result"]) == ("suites of tests by --device=cuda", "1 passed, 1 skipped")
    assert killed["name"] == "kill -9 of one of 2 ranks, over the delegate"
    assert killed["result"].startswith("named by all that are left within ")
    reasons = {one["name"]: one["reason"] for one in result["not_run"]}
    assert reasons["kill -9 of one of 4 ranks, over NCCL"] == "1 GPU found, expected 4"
    assert reasons["tests marked gpu"] == "these tests need a GPU itself"
    assert reasons["1 test"] == "it is about CPUs"
    assert reasons["NCCL over 2 ranks"] == "--stages suites kill leaves it out"
    assert result["machine"]["gpus"] == ["stand-in for CUDA"] and not result["failed"]


def train_without_a_wait(rank: int, training: Any) -> Any:
    """Train under torch's sanitizer, without the wait for the copy of what arrived."""
    from cuda_training import train_under_the_sanitizer
    from test_sabotages import missing
    from torch.cuda import Stream

    with missing(Stream, "wait_event", "hand_over"):
        return train_under_the_sanitizer(rank, training)


def test_the_race_sanitizer_finds_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda_training import Training

    monkeypatch.setenv("TORCH_CUDA_SANITIZER", "1")
    of_ranks = run_processes(train_without_a_wait, 2, Training(), timeout=SOON, is_fresh=True)
    assert any("CSAN detected a possible data race" in report for trained in of_ranks for report in trained.reports)


def test_trainings_differ_in_a_bit_of_a_weight_or_loss() -> None:
    import numpy as np
    from cuda_training import Trained

    weights = {"weight": np.array([1.0, 2.0], np.float32)}
    trained = Trained([2.0, 1.0], [0.5], weights, [], [])
    assert trained.is_bitwise(Trained([2.0, 1.0], [0.5], {"weight": weights["weight"].copy()}, [], []))
    other = {"weight": np.nextafter(weights["weight"], np.float32(9))}
    assert not trained.is_bitwise(Trained([2.0, 1.0], [0.5], other, [], []))
    assert not trained.is_bitwise(Trained([2.0, 1.5], [0.5], weights, [], []))
    assert not trained.is_bitwise(Trained([2.0, 1.0], [0.5], {}, [], []))
    assert trained.distance(Trained([1.0, 1.0], [0.5], {"weight": np.array([1.0, 1.0], np.float32)}, [], [])) == (1.0, 1.0)


def test_on_a_gpu_itself_tests_make_their_tensors_there_and_kernels_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the stand-in is asked there; it takes the GPU's place here."""
    import torch
    from fake_cuda import made_by_tests

    monkeypatch.setattr(made_by_tests, "is_enabled", lambda: False)
    monkeypatch.setattr(made_by_tests, "the_machine", None)
    with made_by_tests.on_cuda(3):
        assert torch.ones(2).device == torch.device("cuda:1")
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.ones(2).device.type == "cpu"
