"""``make gpu-slow-link`` on the stand-in: each kind of row runs, and what can't run is listed with its reason."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
from paths import ROOT

if TYPE_CHECKING:
    from fake_cuda.machine import Machine

SCRIPT = ROOT / "bench" / "gpu_slow_link.py"
SMALL = "--stand-in --json --blocks 4 --steps 3 --delays 20".split()
ORDER, ADAPTED = "adaptra, 1F1B's order", "adaptra, adapted, delegate"


def run(*arguments: str, **more: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Run the script; return its rows by name, and what it wrote beside them."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *SMALL, *arguments], env=os.environ | more, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)}, done.stderr


def test_torch_and_adaptra_run_over_nccl_while_messages_are_held() -> None:
    rows, beside = run("--held", "--gpus", "2", "--only", "torch 1F1B", "torch ZBV", ORDER, ADAPTED)
    for delay in ("0 ms", "20 ms"):
        for job in ("torch 1F1B", "torch ZBV", ORDER, ADAPTED):
            iteration = rows[f"{delay}: {job}; iteration"]
            assert iteration["ours"] > 0 and iteration["ratio"] == iteration["baseline"] / iteration["ours"]
            assert rows[f"{delay}: {job}; longest gap behind a send"]["ours"] >= 0
            assert rows[f"{delay}: {job}; reserved"]["ours"] >= rows[f"{delay}: {job}; allocated"]["ours"] > 0
        for job in (ORDER, ADAPTED):
            assert rows[f"{delay}: {job}; losses have other bits, bar 0"]["ours"] == 0
    assert rows[f"20 ms: {ORDER}; bound"]["baseline"] > rows[f"0 ms: {ORDER}; bound"]["baseline"] > 0
    # Both ways of a microbatch take a delay, whatever the order: 1F1B's step has each at least once.
    for job in ("torch 1F1B", ORDER):
        assert rows[f"20 ms: {job}; iteration"]["ours"] > 40, "nothing was delayed"
    assert "all rows ran" in beside
    assert "14,304 parameters" in beside and "held by a kernel that spins" in beside


def test_ranks_that_share_a_gpu_use_the_delegate_and_what_needs_nccl_is_listed() -> None:
    by_delegate = f"{ORDER}, all by the delegate"
    rows, beside = run("--gpus", "1", "--ranks", "2", "--only", by_delegate, "torch 1F1B", ADAPTED)
    assert rows[f"20 ms: {by_delegate}; iteration"]["ours"] > 40, "nothing was delayed"
    assert {name.partition(": ")[2].partition(";")[0] for name in rows} == {by_delegate}
    for job in ("torch 1F1B", ADAPTED):
        assert f"- {job}: NCCL refuses two ranks on one GPU, and 2 ranks share 1" in beside


def test_without_a_gpu_it_ends_at_once() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "finds no CUDA device, so nothing was measured" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a part of the script."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    return import_module


def test_several_messages_are_held_at_a_time_and_compute_goes_on(machine: Machine, part: Callable[[str], Any]) -> None:
    import torch

    held = part("_held_sends").HeldSends(torch.device("cuda", 0))
    held.delay = 0.3
    sent: list[Any] = []
    begun = time.monotonic()
    for _ in range(3):
        with held.holding():
            sent.append(torch.cuda.Event(enable_timing=True))
            sent[-1].record()
    computed = torch.ones(2, device="cuda").add(1)
    assert computed.tolist() == [2.0, 2.0] and not sent[0].query(), "compute waits for messages"
    sent[-1].synchronize()
    assert time.monotonic() - begun >= 0.3
    assert sent[0].elapsed_time(sent[-1]) < 300, "each waits for the one before"


def test_the_kernel_that_holds_messages_compiles_for_gpus_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, part: Callable[[str], Any]
) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports] - an extra
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports] - an extra

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spin = part("_spin_kernel").spin
    made = triton.compile(ASTSource(spin, {"flag": "*i32"}), target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    loop = r"(\$L\w+):.*ld\.volatile\.global\.b32.*bra\s+\1;"
    assert re.search(loop, made.asm["ptx"], re.DOTALL), "it does not read the flag again and again"


def test_a_gap_is_time_in_which_an_op_could_have_run_while_a_message_was_under_way(part: Callable[[str], Any]) -> None:
    longest_gap = part("_gpu_gaps").longest_gap
    ops = [(0, 0, "F", 0, 0.0, 1.0), (0, 0, "F", 1, 5.0, 6.0), (0, 0, "B", 0, 9.0, 10.0), (1, 1, "B", 0, 4.0, 7.0)]
    # F1 could begin at 1.0, and F0's message is under way until 4.0; B0 waits for its own message until 8.5.
    assert longest_gap(ops, [("F", 1, 0, 4.0), ("I", 0, 0, 8.5)]) == 3.0
    assert longest_gap(ops, [("F", 1, 0, 1.0), ("I", 0, 0, 8.5)]) == 0.0
