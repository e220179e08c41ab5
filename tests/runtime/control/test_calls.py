"""Ranks that call different methods of a pipeline, such as only rank 0 evaluating, are told so within seconds."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors_table import check_documented
from models import EXAMPLES
from processes import run_processes
from training import compiled

from adaptra.errors import PeerLostError, PipelineError
from adaptra.runtime.control.calls import COMPARE_SECONDS, Calls
from adaptra.runtime.world.world import Attempt

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


class Frozen(dist.Store):
    """A store whose host is frozen: no request is ever answered."""

    def __init__(self) -> None:
        super().__init__()
        self.end = threading.Event()

    def clone(self) -> Frozen:
        """Return another client."""
        return self

    def set(self, key: str, value: str) -> None:
        """Wait, as a client of a store that does not answer."""
        self.end.wait(100)


def test_a_cause_that_becomes_known_ends_the_wait_for_the_calls_of_others() -> None:
    """The store's host froze: a neighbour saw that first and closed its connections, and this rank is about to see it."""
    store, is_known = Frozen(), threading.Event()
    calls = Calls(store, 0, 2, lambda _: None)
    error = PeerLostError("connection closed by peer", rank=1)
    error.__cause__ = RuntimeError("connection closed by peer")
    threading.Timer(0.2, is_known.set).start()
    began = time.monotonic()
    assert calls.explain(error, is_known.is_set) is error
    assert time.monotonic() - began < 2 * COMPARE_SECONDS
    store.end.set()
    calls.close()


def test_ranks_compare_the_calls_of_their_own_attempt() -> None:
    """A rank that is in a later attempt already has begun other calls."""
    store = dist.HashStore()
    errors: list[list[PipelineError]] = [[], []]
    ranks = [Calls(store, rank, 2, found.append) for rank, found in enumerate(errors)]
    attempts = [Attempt(0, 1), Attempt()]
    for calls, attempt in zip(ranks, attempts, strict=True):
        calls.attempt = lambda attempt=attempt: attempt
    first, second = ranks
    with first.during("step"), second.during("eval_step"):
        time.sleep(2.5 * COMPARE_SECONDS)
        assert errors == [[], []] and second.ahead([0]) == []
        second.attempt = first.attempt
        time.sleep(4 * COMPARE_SECONDS)
    for found in errors:
        assert ["rank 0 called step, rank 1 eval_step" in str(one) for one in found] in ([True], []), found
    assert any(errors)
    for calls in ranks:
        calls.close()
