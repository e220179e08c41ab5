"""Ranks that call different methods of a pipeline, such as only rank 0 evaluating, are told so within seconds."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from errors_table import check_documented
from models import EXAMPLES
from processes import run_processes
from training import compiled

MICROBATCHES = 2
DIFFERENT = (
    "rank … called …, rank … …: expected the same calls in the same order on all ranks; call it on all of them, not under 'if "
    "rank == 0', and let one use what it returns"
)


def habits(pipe: Any, inputs: Any, targets: Any, folder: str) -> dict[str, Any]:
    return {
        "eval_step": lambda: pipe.eval_step(inputs, targets),
        "save_trace": lambda: pipe.save_trace(f"{folder}/trace.json"),
        "clip_grad_norm_": lambda: pipe.clip_grad_norm_(1.0),
        "full_state_dict": pipe.full_state_dict,
        "close": pipe.close,
    }


def only_rank_0(rank: int, folder: str, stages: int) -> dict[str, tuple[str, str, float]]:
    """What each rank is told, and after how many seconds, where rank 0 alone does something between two steps."""
    torch.distributed.init_process_group("gloo")
    example = EXAMPLES["skip_mlp"]
    (inputs,), _, targets = batch = example.rows(4 * MICROBATCHES, 0)
    found: dict[str, tuple[str, str, float]] = {}
    names = ("eval_step", "save_trace", *(("clip_grad_norm_", "full_state_dict", "close") if stages == 2 else ()))
    for name in names:
        with compiled(example, batch, stages=stages, microbatches=MICROBATCHES) as pipe:
            pipe.step(inputs, targets)
            habit = habits(pipe, inputs, targets, folder)[name]
            torch.distributed.barrier()
            begun = time.monotonic()
            try:
                if rank == 0:
                    habit()
                    if name == "close":
                        continue
                for _ in range(3):
                    pipe.step(inputs, targets)
            except Exception as error:
                found[name] = type(error).__name__, str(error), time.monotonic() - begun
    return found


@pytest.mark.processes
@pytest.mark.parametrize("stages", [1, 2])
def test_what_only_one_rank_calls_is_named_on_all(stages: int, tmp_path: Any) -> None:
    results = run_processes(only_rank_0, 2, str(tmp_path), stages)
    for rank, found in enumerate(results):
        for name, (kind, message, seconds) in found.items():
            told = f"rank 0 called {name}, rank 1 step: expected the same calls" in message
            # A rank that closes also ends its connections, which the other may see first.
            assert told or (name == "close" and message.startswith("rank 0 is lost")), (rank, name, message)
            assert seconds < 100, (rank, name, seconds)  # far less than the 300 s after which an op gives up
            if kind == "PipelineError" and rank == 1:
                check_documented(kind, message, DIFFERENT)
    wanted = ["eval_step", "save_trace", *(["clip_grad_norm_", "full_state_dict"] if stages == 2 else [])]
    assert sorted(results[0]) == sorted(wanted)
    assert sorted(results[1]) == sorted([*wanted, "close"] if stages == 2 else wanted)
