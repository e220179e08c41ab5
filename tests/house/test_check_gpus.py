"""What ``make gpu`` makes of checks that pass, fail or can't run; tests/fake_cuda/test_make_gpu.py runs real ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import check_gpus
import pytest
from check_gpus import Check, Checks

GPUS = {"torch": "2.13", "cuda": "13.0", "nccl": "2.28", "tf32": False, "gpus": ["H100", "H100"], "free_gib": [79.0, 79.0]}


def of_a_rank() -> str:
    raise AssertionError("rank 1: Traceback (most recent call last):\n  File …\nValueError: a device is gone\nin step 1")


def of_pytest() -> str:
    raise AssertionError("2 passed, 1 failed\nFAILED tests/test_a.py\n1 failed, 2 passed in 3 s")


@pytest.fixture
def run_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs checks instead of the real ones, on two GPUs unless others are named: ``run_with(checks, *arguments)``."""

    def run(checks: list[Check], *arguments: str, machine: dict[str, Any] = GPUS) -> int:
        def all_of(self: Checks) -> Iterator[Check]:
            self.left_out += [("2 tests", "no triton")]
            return iter(checks)

        monkeypatch.setattr(Checks, "machine", machine)
        monkeypatch.setattr(Checks, "all", all_of)
        return check_gpus.main(arguments)

    return run


CHECKS = [
    Check("train", "one process", lambda: "close"),
    Check("suites", "tests marked gpu", of_pytest),
    Check("nccl", "NCCL over 2 ranks", of_a_rank, 2),
    Check("nccl", "NCCL over 4 ranks", lambda: "never", 4),
    Check("kill", "kill -9", lambda: "named within 0.1 s", 2),
]


def test_a_check_that_fails_hides_no_other(run_with: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(CHECKS, "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["verdict"], row["result"]) for row in result["checks"]] == [
        ("one process", "passed", "close"),
        ("tests marked gpu", "FAILED", "AssertionError: 2 passed, 1 failed"),
        ("NCCL over 2 ranks", "FAILED", "ValueError: a device is gone"),
        ("kill -9", "passed", "named within 0.1 s"),
    ]
    assert result["failed"] == ["tests marked gpu", "NCCL over 2 ranks"]
    assert result["not_run"] == [
        {"name": "NCCL over 4 ranks", "reason": "2 GPUs found, expected 4"},
        {"name": "2 tests", "reason": "no triton"},
    ]
    assert "FAILED tests/test_a.py" in result["checks"][1]["text"]


def test_the_table_says_what_ran_what_failed_and_what_did_not_run(
    run_with: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(CHECKS) == 1
    out = capsys.readouterr().out
    assert "2 × H100; torch 2.13, CUDA 13.0, NCCL 2.28" in out
    assert "FAILED NCCL over 2 ranks\nAssertionError: rank 1: Traceback" in out
    assert "Did not run:\n  NCCL over 4 ranks: 2 GPUs found, expected 4\n  2 tests: no triton\n" in out
    assert "make gpu: FAILED: tests marked gpu, NCCL over 2 ranks; " in out


def test_it_is_green_if_all_that_can_run_has_passed(run_with: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with([CHECKS[0], CHECKS[3], CHECKS[4]], "--stages", "train") == 0
    out = capsys.readouterr().out
    assert "make gpu: 1 check passed; " in out
    assert "  kill -9: --stages train leaves it out\n" in out


def test_without_a_gpu_nothing_is_run(run_with: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(CHECKS, machine=GPUS | {"gpus": []}) == 1
    captured = capsys.readouterr()
    assert captured.err == "make gpu: torch 2.13 finds no CUDA device, so nothing was tested: see CONTRIBUTING.md\n"
    assert not captured.out


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_each_number_of_gpus_has_its_checks(gpus: int) -> None:
    run = [check.name for check in Checks(is_stand_in=False, as_json=False).all() if check.missing(gpus, False) is None]
    alone = [name for name in run if "NCCL" not in name]
    assert len(alone) == 10, "on one GPU all but NCCL"
    assert [name for name in run if name.startswith("NCCL")] == [
        f"NCCL over {ranks} ranks" for ranks in (2, 4, 8) if ranks <= gpus
    ]
    assert len(run) == len(alone) + 3 * {1: 0, 2: 1, 4: 2, 8: 3}[gpus]
